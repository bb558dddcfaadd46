package pairs

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// giveWay makes this process the last to get a core, and the first that the kernel ends when
// memory is short. What it may not do is left.
func giveWay() {
	const nicest = 19
	_ = syscall.Setpriority(syscall.PRIO_PROCESS, 0, nicest)
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0)
}

// attributes puts the process into a group of its own, with the programs that it starts, and
// has the kernel kill it when the daemon dies.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// awaitExit waits until the process has ended, and leaves its status to be taken.
func awaitExit(pid int) {
	for unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
	}
}

// kill ends the process, whose status has not been taken, and its group.
func kill(p *os.Process) { _ = syscall.Kill(-p.Pid, syscall.SIGKILL) }
