package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/cniinstall"
)

// defaultPlugins is where container runtimes look for plugins.
const defaultPlugins = "/opt/cni/bin"

func installCommand(f *flags) *cobra.Command {
	var from, to string
	cmd := &cobra.Command{
		Use:   "install-cni",
		Short: "Copies the CNI plugin to where the container runtime looks for it",
		Long: `Copies the CNI plugin, by default the one beside this program, to where the
container runtime looks for it, whole or not at all. The configuration that
names it is the agent's to write, once it is ready (--cni-conf-dir).`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			log, err := f.logger()
			if err != nil {
				return err
			}
			if from == "" {
				self, err := os.Executable()
				if err != nil {
					return fmt.Errorf("--cni-plugin is not given and the place of this program unknown: %w", err)
				}
				from = filepath.Join(filepath.Dir(self), cniinstall.Plugin)
			}
			changed, err := cniinstall.Program(from, to)
			if err != nil {
				return err
			}
			log.Info("the CNI plugin is in place", "file", filepath.Join(to, cniinstall.Plugin), "changed", changed)
			return nil
		},
	}
	cmd.Flags().StringVar(&from, "cni-plugin", "", "program to copy (default: podweir-cni beside this one)")
	cmd.Flags().StringVar(&to, "cni-bin-dir", defaultPlugins, "folder that the runtime takes plugins from")
	return cmd
}

func mountCommand(f *flags) *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:   "mount-bpffs",
		Short: "Mounts a BPF file system where there is none",
		Long: `Mounts a BPF file system on a folder, unless one is there already. In a
container the mount reaches the node if the folder's own mount is shared with
it (mountPropagation: Bidirectional).`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			log, err := f.logger()
			if err != nil {
				return err
			}
			var st unix.Statfs_t
			if err := unix.Statfs(dir, &st); err != nil {
				return fmt.Errorf("--dir %s: %w", dir, err)
			}
			if st.Type == unix.BPF_FS_MAGIC {
				log.Info("a BPF file system is there", "folder", dir)
				return nil
			}
			if err := unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
				return fmt.Errorf("mount a BPF file system on %s: %w", dir, err)
			}
			log.Info("a BPF file system is mounted", "folder", dir)
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "/sys/fs/bpf", "folder to mount it on")
	return cmd
}

func waitCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "wait",
		Short: "Does nothing until it is ended",
		Long: `Does nothing until it is ended: for a pod whose work is that of its init
containers, such as removing podweir from a node.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			<-cmd.Context().Done()
			return nil
		},
	}
}
