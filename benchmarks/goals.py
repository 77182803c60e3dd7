"""Goals: back-end, case and size, a way and another, and the most that the ratio of their times may be."""

COLLECTIVES = ("Broadcast", "SumReduce", "AllSumReduce", "Repartition", "AllGather", "ReduceScatter")
GATHERED = ("Broadcast", "SumReduce", "AllSumReduce")
FIELD = "4x16x128x128"

PRIMITIVES = [
    *(("mpi", name, "16 MiB", "ours", "floor", 0.95) for name in COLLECTIVES),
    *(("mpi", name, "256 KiB", "ours", "floor", 1.15 if name in GATHERED else 1.2) for name in COLLECTIVES),
    *(("mpi", name, "1 KiB", "ours", "floor", 1.3 if name in GATHERED else 1.25) for name in COLLECTIVES),
    *(("mpi", name, "1 KiB", "fixed shapes", "floor", 1.1) for name in COLLECTIVES),
    ("mpi", "Repartition", "2048x2048", "ours", "floor", 1.0),
    ("mpi", "Repartition", "2048x2048", "ours", "DTensor", 1 / 8),
    ("gloo", "Repartition", "2048x2048", "ours", "DTensor", 1 / 2),
    ("mpi", "Convolution", "4x16x256x256", "ours", "half", 1.05),
    ("mpi", "Convolution", "1x8x32x32", "ours", "half", 2.3),
    ("mpi", "Convolution", "1x8x32x32", "global", "half", 1.6),
    ("mpi", "Convolution", "4x16x256x256", "ours", "all", 1 / 1.9),
    ("mpi", "BatchNorm", FIELD, "ours", "half", 1.5),
    ("mpi", "GroupNorm", FIELD, "ours", "half", 1.8),
    ("mpi", "LayerNorm split", "64x256x512", "ours", "half", 2.0),
    ("mpi", "ConvTranspose", FIELD, "ours", "half", 1.1),
    ("mpi", "MaxPool", FIELD, "ours", "half", 1.1),
    ("mpi", "Upsample", FIELD, "ours", "half", 1.1),
    ("mpi", "AdaptiveAvgPool", FIELD, "ours", "half", 1.2),
    ("mpi", "Dropout", FIELD, "ours", "half", 1.15),
    *(("gloo", name, "16 MiB", "ours", "floor", 1.2) for name in COLLECTIVES),
    *(("gloo", name, "1 KiB", "ours", "floor", 1.5 if name == "Repartition" else 1.8) for name in COLLECTIVES),
    *(("gloo", name, "1 KiB", "fixed shapes", "floor", 1.3) for name in COLLECTIVES),
]
MODELS = [
    ("mpi", "UNet 2-d", "256x256", "global", "share", 1.08),
    ("mpi", "UNet 2-d", "64x64", "global", "share", 1.25),
    ("mpi", "LeNet", "32x1x32x32", "modules", "share", 1.5),
    ("mpi", "LeNet", "32x1x32x32", "global", "share", 1.3),
    ("threads", "LeNet", "32x1x32x32", "modules", "share", 1.6),
]
THREADS_AT_1_KIB = 0.4e-3  # seconds, for any primitive
