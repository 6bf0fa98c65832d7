package endpoint

import (
	"errors"
	"fmt"
)

// Code tells callers what to do about an error. Codes below 100 are those of
// the CNI specification.
type Code uint

// Codes of [Error].
const (
	CodeUnknownContainer Code = 3   // CHECK: no such endpoint
	CodeBadRequest       Code = 4   // a parameter is missing or wrong
	CodeIO               Code = 5   // state could not be read or written
	CodeDecode           Code = 6   // the request is no JSON
	CodeBadNetns         Code = 8   // the pod's network namespace is gone or wrong
	CodeTryAgain         Code = 11  // not now: the agent starts, or time ran out
	CodeNotAvailable     Code = 50  // no ADD can work
	CodeLimited          Code = 51  // so, and pods that are there may be cut off
	CodeAddress          Code = 100 // a requested address cannot be given
	CodeExhausted        Code = 101 // no address is left
	CodeExists           Code = 102 // the interface exists already
	CodeDiffers          Code = 103 // CHECK: something is not as ADD made it
	CodeHostPort         Code = 104 // a requested port of the node is another pod's
	CodeInternal         Code = 999
)

// Error is what [Manager]'s operations return.
type Error struct {
	Code    Code   `json:"code"`
	Msg     string `json:"msg"`
	Details string `json:"details,omitempty"`

	err error
}

func (e *Error) Error() string {
	if e.Details == "" {
		return e.Msg
	}
	return e.Msg + ": " + e.Details
}

func (e *Error) Unwrap() error { return e.err }

func errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Msg: err.Error(), err: errors.Unwrap(err)}
}

// AsError returns err as an [*Error]: itself if it is one or wraps one, else
// one with CodeInternal. Nil stays nil.
func AsError(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		if err == error(e) {
			return e
		}
		return &Error{Code: e.Code, Msg: err.Error(), err: err}
	}
	return &Error{Code: CodeInternal, Msg: err.Error(), err: err}
}
