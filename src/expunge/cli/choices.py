"""The names that help texts list and tab completion offers.

They stand here a second time because their own modules import torch, and help must not wait for it; a test compares
them with the originals.
"""

DATASETS = ("digits", "mnist", "fashion-mnist", "cifar10", "hospitals")
DEMO_SEEDS = (10, 11, 12)
DEMOS = ("digits", "hospitals")
DEVICES = ("cpu", "cuda", "auto")
ENGINES = ("local", "flower-simulation", "flower")
EXPERIMENTS = (
    "main",
    "datasets",
    "backdoor",
    "components",
    "damping",
    "heterogeneity",
    "clients",
    "wallclock",
    "functional",
    "convergence",
    "conditioning",
    "sequential",
    "samples",
    "several",
    "colluders",
    "adversary",
    "insiders",
    "trainings",
    "response",
    "persistence",
    "replay",
    "hospitals",
    "fresh",
    "tried",
    "verdict",
    "evidence",
    "text",
    "tofu",
)
HOSPITALS = ("cleveland", "budapest", "switzerland", "long-beach")
METHODS = (
    "auto",
    "do-nothing",
    "fed-eraser",
    "fed-osd",
    "fine-tuning",
    "fine-tuning-same-budget",
    "gradient-ascent",
    "hf-kcu",
    "hf-kcu+recovery",
    "hf-kcu-paper",
    "hf-kcu-paper+recovery",
    "not",
    "projected-gradient-ascent",
    "retrace",
    "retrace+recovery",
    "retrace-krylov",
    "retrace-krylov+recovery",
    "retrain",
    "sisa",
    "unfiltered+recovery",
)
MODELS = (
    "cnn",
    "cnn-narrow",
    "resnet18",
    "vit-lite",
    "resnet18-bf16",
    "vit-lite-bf16",
    "softmax",
    "digits-net",
    "mlp",
)
RETRAINS = 5
SCALES = ("smoke", "small", "paper")
