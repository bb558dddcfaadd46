package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
)

// ErrLiveSocket is wrapped when another process serves the path.
var ErrLiveSocket = errors.New("another live process serves this socket")

// liveDialTimeout is how long Listen waits for an answer on a socket that is there
// already. A Unix connect is answered by the kernel, so this is only for a full
// backlog, which is a live process as well.
const liveDialTimeout = 500 * time.Millisecond

// A Socket is a Unix socket that this process alone serves.
type Socket struct {
	*net.UnixListener
	path string
	lock *os.File
	once sync.Once
	err  error
}

// Listen creates a Unix socket of mode 0600. One that a dead process left behind is
// replaced; a live one is refused with ErrLiveSocket. A lock file beside the socket
// tells the two apart even when two daemons start at the same moment.
func Listen(path string) (*Socket, error) {
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("engine socket: %w", err)
	}
	fail := func(err error) (*Socket, error) {
		lock.Close()
		return nil, fmt.Errorf("engine socket %s: %w", path, err)
	}
	if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return fail(fmt.Errorf("%w; stop that daemon or choose another engine_socket", ErrLiveSocket))
	}
	if err := removeDead(path); err != nil {
		return fail(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return fail(err)
	}
	// Until here the mode is the umask's; who connects in between is asked for its
	// credentials like everybody else.
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return fail(err)
	}
	return &Socket{UnixListener: l, path: path, lock: lock}, nil
}

// removeDead removes a socket at path that nobody serves.
func removeDead(path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.Mode()&fs.ModeSocket == 0 {
		return fmt.Errorf("the path exists and is no socket but %v; remove it or choose another engine_socket", st.Mode())
	}
	conn, err := net.DialTimeout("unix", path, liveDialTimeout)
	if err == nil {
		conn.Close()
	}
	if err == nil || !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("%w; stop that process or choose another engine_socket", ErrLiveSocket)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Close stops listening and removes the socket. Closing twice is harmless.
func (s *Socket) Close() error {
	s.once.Do(func() {
		s.err = s.UnixListener.Close() // the server may have closed it already
		if errors.Is(s.err, net.ErrClosed) {
			s.err = nil
		}
		os.Remove(s.path) // while the lock is held: nobody else's socket is there
		s.lock.Close()
	})
	return s.err
}

// peerCredentials lets in processes of this user and of root, by the kernel's word.
type peerCredentials struct{ uid uint32 }

// Process is the kernel's word on who is at the other end.
type Process struct {
	PID int32
	UID uint32
}

// AuthType implements credentials.AuthInfo.
func (Process) AuthType() string { return "unix-peer" }

func (c peerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	uc, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, nil, fmt.Errorf("engine API: connection is %T; only a Unix socket says who connects", conn)
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return nil, nil, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return nil, nil, err
	}
	if credErr != nil {
		return nil, nil, fmt.Errorf("engine API: peer credentials: %w", credErr)
	}
	if cred.Uid != c.uid && cred.Uid != 0 {
		return nil, nil, fmt.Errorf("engine API: process %d of user %d is not allowed; the daemon runs as user %d: run the engine as that user or as root", cred.Pid, cred.Uid, c.uid)
	}
	return conn, Process{PID: cred.Pid, UID: cred.Uid}, nil
}

func (c peerCredentials) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return conn, Process{}, nil
}

func (c peerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix-peer"}
}

func (c peerCredentials) Clone() credentials.TransportCredentials { return c }

func (c peerCredentials) OverrideServerName(string) error { return nil }
