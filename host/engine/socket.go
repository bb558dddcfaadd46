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

	"github.com/tierd/tierd/host/lockfile"
)

// ErrLiveSocket is wrapped when another process serves the path.
var ErrLiveSocket = errors.New("another live process serves this socket")

// liveDialTimeout is how long Listen waits for an answer on a socket that is there
// already. A Unix connect is answered by the kernel, so this is only for a full
// backlog, which is a live process as well.
const liveDialTimeout = 500 * time.Millisecond

// A SocketLock keeps a socket's path for this process.
type SocketLock struct {
	path string
	lock *lockfile.Lock
}

// LockSocket takes the path of a Unix socket, so that whoever has it already is noticed
// long before Listen. A socket that a dead process left behind is removed; a live one is
// refused with ErrLiveSocket. The lock file beside the socket tells the two apart even
// when two daemons start at the same moment.
func LockSocket(path string) (*SocketLock, error) {
	lock, err := lockfile.Take(path+".lock", fmt.Sprintf("process %d", os.Getpid()))
	var held *lockfile.HeldError
	switch {
	case errors.As(err, &held):
		return nil, fmt.Errorf("engine socket %s: %w (%v); stop that daemon or choose another engine_socket", path, ErrLiveSocket, held)
	case err != nil:
		return nil, fmt.Errorf("engine socket: %w", err)
	}
	if err := removeDead(path); err != nil {
		return nil, errors.Join(fmt.Errorf("engine socket %s: %w", path, err), lock.Release())
	}
	return &SocketLock{path, lock}, nil
}

// Release gives the path up, with its lock file. It must not come before the end of the
// socket; releasing twice is harmless.
func (l *SocketLock) Release() error { return l.lock.Release() }

// A Socket is a Unix socket that this process alone serves.
type Socket struct {
	*net.UnixListener
	lock *SocketLock
	once sync.Once
	err  error
}

// Listen is LockSocket and SocketLock.Listen in one.
func Listen(path string) (*Socket, error) {
	lock, err := LockSocket(path)
	if err != nil {
		return nil, err
	}
	s, err := lock.Listen()
	if err != nil {
		return nil, errors.Join(err, lock.Release())
	}
	return s, nil
}

// Listen creates the socket with mode 0600. Closing it releases the lock.
func (l *SocketLock) Listen() (*Socket, error) {
	u, err := net.ListenUnix("unix", &net.UnixAddr{Name: l.path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("engine socket %s: %w", l.path, err)
	}
	// Until here the mode is the umask's; who connects in between is asked for its
	// credentials like everybody else.
	if err := os.Chmod(l.path, 0o600); err != nil {
		u.Close()
		return nil, fmt.Errorf("engine socket %s: %w", l.path, err)
	}
	return &Socket{UnixListener: u, lock: l}, nil
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
		os.Remove(s.lock.path) // while the lock is held: nobody else's socket is there
		s.err = errors.Join(s.err, s.lock.Release())
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
