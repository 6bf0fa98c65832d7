// Package deploy holds what podweir is installed with: base for kustomize,
// uninstall for the way back. The files are the truth about flags and
// permissions of an installed agent; the tests here and in cmd/agent compare
// them with the program and with the documents.
package deploy
