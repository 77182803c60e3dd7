"""Where the time of a step goes, on worker 0: from the ledger (waits), from torch's profiler (its own operators)."""

import time

import torch

import distdl

STEPS = 4
SUMS = ("norm", "loss", "entropy", "var", "mean", "sum")  # in labels of exchanges that add up numbers of all workers


def of(case, barrier, comm):
    """For each way that exchanges messages, milliseconds a step by kind, and messages and bytes.

    ``step`` is all of it. ``operators`` is torch's own operators on this worker, ``share`` the same for the case's
    ``share``. ``agreement``, ``weights`` (weights and their gradients), ``sums`` (moments, losses) and ``halos`` (all
    else that moves) are waits, and what is left is ``python``: the interpreter, autograd's bookkeeping, the making of
    messages.
    """
    share = operators(case.steps["share"], barrier)
    found = {}
    for way in ("global", "modules"):
        if way not in case.steps:
            continue
        step = case.steps[way]
        times = {"share": share, "operators": operators(step, barrier)}
        barrier()
        with distdl.ledger(comm=comm) as book:
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            times["step"] = (time.perf_counter() - begin) / STEPS * 1e3
        for kind in ("agreement", "weights", "sums", "halos"):
            entries = [entry for entry in book.entries if kind_of(entry) == kind]
            times[kind] = sum(entry.waited for entry in entries) / STEPS * 1e3
            times[f"{kind} calls"] = sum(entry.calls for entry in entries) / STEPS
            times[f"{kind} MiB"] = sum(entry.sent + entry.collective for entry in entries) / STEPS / 2**20
        waits = sum(times[kind] for kind in ("agreement", "weights", "sums", "halos"))
        times["python"] = times["step"] - times["operators"] - waits
        found[way] = times
    return found


def kind_of(entry):
    layer = entry.layer.lower()
    if entry.operation == "agreement":
        return "agreement"
    if "replicated" in layer or "shards" in layer or (entry.operation in ("broadcast", "sum") and "norm" not in layer):
        return "weights"
    return "sums" if entry.operation == "all_sum" or any(word in layer for word in SUMS) else "halos"


def operators(step, barrier):
    """Milliseconds of torch's operators in one step."""
    barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(STEPS):
            step()
    own = [event.self_cpu_time_total for event in profile.key_averages() if event.key.startswith("aten::")]
    return sum(own) / STEPS / 1e3
