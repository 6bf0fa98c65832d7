// Package test renders the chart with Helm's own library and the base with
// kustomize's, and compares the two: a module of its own, for their sake.
package test
