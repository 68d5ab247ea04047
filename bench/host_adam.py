#!/usr/bin/env python3
"""AdamW on the host beside PyTorch's fused CPU AdamW and DeepSpeed's CPU Adam, in turns in one run, with a memory triad.

usage: host_adam.py [--bench target/release/examples/host_adam] [--params N] [--threads N] [--rounds N]
                    [--forms fp32,bf16] [--small-pages]

Needs torch; DeepSpeed too where it is installed (`pip install deepspeed ninja` and a C++ compiler: it builds its CPU Adam at
first use). Build our side with `cargo build --release -p gpurun-device --example host_adam`. Memory: 32 bytes a parameter, 36
with the form bf16. Peers get huge pages as we do (THP_MEM_ALLOC_ENABLE=1), unless --small-pages.

touch: what fp32 reads and writes, with no more than an addition: the floor. fp32: gradient, weight, m and v in fp32, 28 bytes a parameter. bf16: the gradient comes and the weight goes in bf16 beside an
fp32 master; the peers have no such form, and convert before and after their step.
"""
import argparse, os, statistics, subprocess, sys, time

args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
args.add_argument("--bench", default="target/release/examples/host_adam")
args.add_argument("--params", type=int, default=500_000_000)
args.add_argument("--threads", type=int, default=os.cpu_count())
args.add_argument("--rounds", type=int, default=5)
args.add_argument("--forms", default="fp32,bf16")
args.add_argument("--small-pages", action="store_true")
args = args.parse_args()
if not args.small_pages:
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
os.environ["OMP_NUM_THREADS"] = str(args.threads)
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # ninja

import torch

RUNS = 32


class Ours:
    def __init__(self):
        command = [args.bench, "--serve", "--params", str(args.params), "--threads", str(args.threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.params = int(self.answer()[1])

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{args.bench} ended with {self.process.wait()}")
        return line.split()

    def round(self, form):
        """Bytes, seconds."""
        self.process.stdin.write(form + "\n")
        self.process.stdin.flush()
        return tuple(float(x) for x in self.answer()[1:])


class Peers:
    """Both peers step the same tensors, so that both fit in memory."""

    def __init__(self, params):
        size = params // RUNS
        full = lambda value: [torch.full((size,), value) for _ in range(RUNS)]
        self.weights = [torch.nn.Parameter(t) for t in full(0.7)]
        self.m, self.v = full(0.01), full(1e-4)
        self.narrow = None
        for p, grad in zip(self.weights, full(0.02)):
            p.grad = grad
        self.optimizers = {}
        options = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        self.add("PyTorch fused", torch.optim.AdamW(self.weights, fused=True, **options), lambda: torch.tensor(0.0))
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            self.add("DeepSpeed", DeepSpeedCPUAdam(self.weights, adamw_mode=True, **options), lambda: 0)
        except Exception as error:  # it builds C++ code: whatever goes wrong there is the reason
            print(f"DeepSpeed's CPU Adam is left out: {error!r}")

    def add(self, name, optimizer, step):
        for p, m, v in zip(self.weights, self.m, self.v):
            optimizer.state[p] = dict(step=step(), exp_avg=m, exp_avg_sq=v)
        self.optimizers[name] = optimizer

    def round(self, name, form):
        if form == "bf16" and self.narrow is None:
            self.narrow = [(p.grad.bfloat16(), p.detach().bfloat16()) for p in self.weights]
        begin = time.perf_counter()
        with torch.no_grad():
            if form == "bf16":
                for p, (grad, _) in zip(self.weights, self.narrow):
                    p.grad.copy_(grad)
            self.optimizers[name].step()
            if form == "bf16":
                for p, (_, weight) in zip(self.weights, self.narrow):
                    weight.copy_(p)
        return time.perf_counter() - begin


def main():
    torch.set_num_threads(args.threads)
    ours = Ours()
    peers = Peers(ours.params)
    forms = args.forms.split(",")
    times, sizes = {}, {}
    for number in range(args.rounds + 1):
        def note(key, seconds):
            if number > 0:  # the first round touches memory for the first time
                times.setdefault(key, []).append(seconds)

        for form in ("triad", "touch"):
            sizes[form], seconds = ours.round(form)
            note((form, ""), seconds)
        for form in forms:
            sizes[form], seconds = ours.round(form)
            note((form, "gpurun"), seconds)
            for name in peers.optimizers if form in ("fp32", "bf16") else []:
                note((form, name), peers.round(name, form))
    pages = "small pages for the peers" if args.small_pages else "huge pages for all"
    print(f"{ours.params} parameters, {args.threads} threads, {args.rounds} rounds in turns, {pages}, torch {torch.__version__}")
    best = {key: min(value) for key, value in times.items()}
    rate = {key: sizes[key[0]] / seconds / 1e9 for key, seconds in best.items()}
    for key, seconds in times.items():
        print(f"{' '.join(key):20} best {best[key]:7.3f} s {rate[key]:6.2f} GB/s   median {statistics.median(seconds):7.3f} s")
    for form in forms:
        ceilings = [f"{rate[form, 'gpurun'] / rate[name, '']:.2f} of {name}" for name in ("triad", "touch")]
        rivals = {name: best[form, name] / best[form, "gpurun"] for name in peers.optimizers if (form, name) in best}
        print(f"{form}: " + "; ".join(ceilings + [f"{ratio:.2f} times as fast as {name}" for name, ratio in rivals.items()]))


main()
