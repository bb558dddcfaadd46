package pairs

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// niceness leaves a process a tenth of a core that others want whole: with 19 it would have a
// seventieth, and on a machine without an idle core its time would be spent before it is done.
const niceness = 10

// giveWay makes this process wait for all others, and the first that the kernel ends when
// memory is short. What it may not do is left.
func giveWay() {
	_ = syscall.Setpriority(syscall.PRIO_PROCESS, 0, niceness)
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
