// Package devices has the devices of one node: host memory always, and at most one GPU.
// It chooses the GPU, counts what the devices copy, and knows how the GPU is.
//
// # The story
//
// Open makes the device for host memory, and opens the GPU that the configuration names:
//
//	mem          no GPU
//	cuda:N       the GPU with the driver's number N, which depends on CUDA_VISIBLE_DEVICES
//	cuda:UUID    the GPU with this UUID, as nvidia-smi -L has it
//	auto         the first GPU where there is a driver and a GPU, else none
//
// A GPU that is named must open, or the node does not start. With auto a GPU that cannot
// be opened is a warning, because the node serves engines in host memory without it; Why
// says in words what was chosen and why.
//
// The GPU is opened with cuda.Options.Separate: its engines are other processes, and a
// kernel of ours would cost them a tenth of their speed. Where daemon and engines run under
// CUDA's Multi-Process Service it costs them a hundredth, and is used.
//
// # How the GPU is
//
// A goroutine asks the driver's management library every few seconds and keeps the last
// answer, so that status and metrics never wait for a driver. That there is no library, no
// driver or no GPU is a normal state. What the library says of a bad link, of memory errors
// and of critical errors (XID) comes out as warnings, in the log once each, and in Report as
// long as they hold. A GPU is lost once a call has failed in such a way that its context is
// of no use any more; then each copy fails at once, and the node goes on with host memory.
package devices
