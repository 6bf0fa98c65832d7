package policy

import (
	"slices"

	"github.com/podweir/podweir/internal/maps"
)

// transitionalClasses lets old tables answer for classes they do not know,
// and new tables for classes that go.
//
// All ports of a new class are alike to an old table (see partition), so it
// answers as for the old class of any of them. A new table allows a class
// that goes if it allows all the classes its ports go to, and denies it if not:
// a packet whose class was read before the change may meet it.
func (c *change) transitionalClasses() {
	old, now := c.prev.ports, c.st.ports
	oldClasses, nowClasses := old.all(), now.all()
	origin := make(map[uint16][]uint16) // old class: new classes it answers for
	for _, iv := range now.list {
		if !slices.Contains(oldClasses, iv.Class) {
			from := old.of(iv.Lo)
			if !slices.Contains(origin[from], iv.Class) {
				origin[from] = append(origin[from], iv.Class)
			}
		}
	}
	for t, entries := range c.prev.tables {
		if _, stays := c.st.tables[t]; stays {
			continue
		}
		v := make(view)
		c.views[t] = v
		for k, e := range entries {
			v.add(k, e)
			if k.Kind != maps.PolicyClass {
				continue
			}
			for _, class := range origin[k.Port] {
				nk := k
				nk.Port = class
				c.extra[nk] = e
				v.add(nk, e)
			}
		}
	}
	goes := make(map[uint16][]uint16) // class that goes: classes of its ports
	for _, iv := range old.list {
		if !slices.Contains(nowClasses, iv.Class) {
			for _, class := range now.within(iv.Lo, iv.Hi) {
				if !slices.Contains(goes[iv.Class], class) {
					goes[iv.Class] = append(goes[iv.Class], class)
				}
			}
		}
	}
	for t, entries := range c.st.tables {
		if _, stays := c.prev.tables[t]; stays {
			continue
		}
		for gone, classes := range goes {
			c.goneClass(t, entries, gone, classes)
		}
	}
}

// goneClass writes what table t says of all the classes for one that goes.
func (c *change) goneClass(t uint32, entries Table, gone uint16, classes []uint16) {
	type subject struct {
		identity uint32
		proto    uint8
	}
	done := make(map[subject]bool)
	for k := range entries {
		about := subject{k.Identity, k.Proto}
		if k.Kind != maps.PolicyClass || done[about] || !slices.Contains(classes, k.Port) {
			continue
		}
		done[about] = true
		decide := func(class uint16) maps.PolicyEntry {
			return c.decide(t, entries, k.Identity, slot{maps.PolicyClass, k.Proto, class})
		}
		all := decide(classes[0])
		for _, class := range classes[1:] {
			all = strictest(all, decide(class))
		}
		c.put(t, k.Identity, slot{maps.PolicyClass, k.Proto, gone}, all, c.decide(t, entries, k.Identity, anySlot))
	}
}
