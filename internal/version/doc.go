// Package version says which podweir a program is.
package version
