"""A model for the benchmark: 8192^3 bf16 products, one after the other. Each line on
standard input is a number of seconds; the answer is the median speed in TFLOP/s."""

import sys
import time

import torch

n = 8192
a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
b = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
c = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
for _ in range(50):
    torch.mm(a, b, out=c)
torch.cuda.synchronize()
print("ready", flush=True)
for line in sys.stdin:
    end = time.monotonic() + float(line)
    speeds = []
    while time.monotonic() < end:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
        marks[0].record()
        for m in marks[1:]:
            torch.mm(a, b, out=c)
            m.record()
        marks[-1].synchronize()
        # The mean of 20: a single product hides what falls between two of them.
        speeds.append(2 * n**3 * 20 / marks[0].elapsed_time(marks[-1]) / 1e9)
    speeds.sort()
    print(speeds[len(speeds) // 2], flush=True)
