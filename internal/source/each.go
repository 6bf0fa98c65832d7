package source

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/pager"
)

// Each hands over the objects of a kind ("Pod") as the API server has them now,
// some at a time: for who asks once and follows nothing.
func (c *Client) Each(ctx context.Context, kindName string, each func(metav1.Object)) error {
	for _, k := range kinds() {
		if k.name != kindName {
			continue
		}
		lw, err := c.listWatch(k)
		if err != nil {
			return err
		}
		err = pager.New(lw.ListWithContext).EachListItem(ctx, metav1.ListOptions{}, func(o runtime.Object) error {
			obj, ok := o.(metav1.Object)
			if !ok {
				return fmt.Errorf("a list has a %T in it", o)
			}
			each(obj)
			return nil
		})
		if err != nil {
			return fmt.Errorf("cannot list %s: %w", k.resource, err)
		}
		return nil
	}
	return fmt.Errorf("%s is none of the kinds that are read", kindName)
}
