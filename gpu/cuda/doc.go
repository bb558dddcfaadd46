// Package cuda is the device for NVIDIA GPUs. It reaches the driver (libcuda) at run
// time, without cgo and without a CUDA toolkit, so that one binary serves machines with
// and without a GPU; where there is no driver, Open says ErrNoDriver.
//
// # How bytes move
//
// A chunk lies in fragments of a few KiB, and PCIe wants few, long DMAs. So a store
// gathers fragments with a kernel into a staging buffer on the GPU and moves that with
// one DMA; a load does the reverse. A kernel that reads and writes host memory itself
// would be simpler, and takes up to half of the matrix units from the model; a DMA for
// each fragment reaches a tenth of the link. (RATIONALE.md has the numbers.)
//
// Each direction has a lane of staging buffers, and each buffer a stream of its own, so
// that the kernel of one buffer runs beside the DMA of another. A call is cut into
// batches, one a buffer; calls share the buffers in turns, so that a long call does not
// starve a short one. Two kinds of fragments go without staging and without a kernel: long
// ones, many to a command where the driver can (CUDA 12.8) and else each by its own DMA, and
// those of one length at equal distances in one allocation (a block of an engine that keeps
// each layer apart), by one strided DMA for all. At Open the device is
// measured: how many blocks of threads the kernels need to keep the link full, and from
// which lengths on fragments go without. Tuning holds the result, and Options.TuningFile
// keeps it from one start to the next. An engine in another process pays for every kernel
// of ours, because a GPU runs the kernels of two processes in turns: see Options.Separate.
// Under MPS (nvidia-cuda-mps-control) it runs them at the same time, and an engine loses a
// hundredth.
//
// # Threads and waiting
//
// The driver keeps the current context in the operating system's thread, so each stretch
// of calls locks the goroutine to its thread and sets the context first. Nobody blocks in
// the driver: one of a lane's waiting callers at a time, the leader, asks for the state of
// all its buffers and wakes the others. It sleeps between two looks while what is in flight
// lasts longer than the sleep, asks without a pause when less is, and sleeps again when no
// buffer has been done for spinTime.
//
// # Failure
//
// Every call is checked; an Error has the driver's name and text. Codes after which a
// context is unusable make the device lost: this and every later call fails with a
// LostError (gpu.ErrLost), and the process goes on; closing a lost device asks nothing of
// the driver, which may block. A driver that lacks a function is
// refused at Open, naming all that it lacks.
//
// # Memory
//
// A region is one allocation of its own, in units of 2 MiB, because CUDA IPC shares whole
// units: an engine that maps its region sees nothing else. Host memory that copies use
// should be pinned (Pin, AllocHost); copies to other memory are right, and slow.
package cuda

//go:generate clang++ -x cuda --cuda-device-only --cuda-gpu-arch=sm_70 -nocudainc -nocudalib -O3 -fno-exceptions -Xclang -target-feature -Xclang +ptx60 -S -o kernel/copy.ptx kernel/copy.cu
