package proc

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// attributes puts the process into a group of its own, and has the kernel kill it when the
// thread that started it ends, as it does when the daemon dies.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// awaitExit waits until the process has ended, and leaves its status to be taken.
func awaitExit(pid int) {
	for unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
	}
}

// killGroup kills the process, whose status has not been taken, and its group.
func killGroup(p *os.Process) { _ = syscall.Kill(-p.Pid, syscall.SIGKILL) }
