#!/usr/bin/env python3
"""Training speed on the CPU beside PyTorch, fp32, same sizes, same threads, in turns in one run.

usage: cpu_vs_pytorch.py [--gpurun target/release/gpurun] [--threads N] [--steps N] [--rounds N]
Needs torch (any build with CPU kernels). Prints one line a model: tokens/s of each, and the ratio.
"""
import argparse, json, os, pathlib, statistics, subprocess, sys, tempfile, time

import torch, torch.nn as nn, torch.nn.functional as F

CASES = {
    "tiny": dict(layers=4, width=128, heads=4, vocab=257, context=256, seq=128, batch=16, args=["--seq-len", "128", "--micro-batch", "16", "--global-batch", "16"]),
    "10m": dict(layers=6, width=384, heads=6, vocab=257, context=256, seq=256, batch=8, args=["--config", str(pathlib.Path(__file__).parent / "10m.toml")]),
}


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.ln1, self.ln2 = h, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc, self.out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.h, d // self.h).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(d, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(a)
        return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c["vocab"], c["width"]), nn.Embedding(c["context"], c["width"])
        self.blocks = nn.ModuleList(Block(c["width"], c["heads"]) for _ in range(c["layers"]))
        self.ln = nn.LayerNorm(c["width"])

    def forward(self, x, y):
        h = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.ln(h), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))


def pytorch(c, steps):
    """Seconds of each step after a warm-up."""
    torch.manual_seed(0)
    model = Gpt2(c)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0)], lr=1e-3, fused=True)
    times = []
    for _ in range(steps + 3):
        x = torch.randint(0, 256, (c["batch"], c["seq"]))
        begin = time.perf_counter()
        loss = model(x, x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - begin)
    return times[3:]


def gpurun(exe, c, steps, threads):
    with tempfile.TemporaryDirectory() as tmp:
        metrics = pathlib.Path(tmp) / "metrics.jsonl"
        command = [exe, "train", *c["args"], "--steps", str(steps + 3), "--threads", str(threads), "--metrics", str(metrics), "--device", "cpu", "--dtype", "fp32"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        return [json.loads(line)["step_seconds"] for line in metrics.read_text().splitlines()][3:]


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--gpurun", default="target/release/gpurun")
    args.add_argument("--threads", type=int, default=os.cpu_count())
    args.add_argument("--steps", type=int, default=20)
    args.add_argument("--rounds", type=int, default=3)
    args = args.parse_args()
    torch.set_num_threads(args.threads)
    print(f"threads {args.threads}, torch {torch.__version__}, median of {args.rounds} x {args.steps} steps")
    for name, c in CASES.items():
        ours, theirs = [], []
        for _ in range(args.rounds):
            theirs += pytorch(c, args.steps)
            ours += gpurun(args.gpurun, c, args.steps, args.threads)
        tokens = c["batch"] * c["seq"]
        a, b = tokens / statistics.median(ours), tokens / statistics.median(theirs)
        print(f"{name:5} gpurun {a:9.0f} tokens/s   pytorch eager {b:9.0f} tokens/s   ratio {a / b:.2f}")


if __name__ == "__main__":
    main()
