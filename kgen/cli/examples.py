"""The descriptions of `--help` and its examples. A test parses the examples."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

# command -> the description above its options
DESCRIPTIONS: Mapping[str, str] = {
    "tune":
        "Search the configs of an operator for each problem (dims, dtypes and options of a call). "
        "Every config is compiled and checked against the float64 definition before it is timed. "
        "The fastest configs are certified and timed beside the peers (eager PyTorch, "
        "torch.compile, published kernels); the winner goes into the library (--out) and the "
        "report. The same command resumes after Ctrl-C or a crash: trials are kept in a journal. "
        "If --gpu names a GPU that is not in this machine, kernels are predicted instead (kgen "
        "predict).",
    "predict":
        "Choose kernels for a GPU that is not in this machine. A model learns from the recorded "
        "searches of other GPUs and ranks the feasible configs; the most promising are compiled "
        "for the GPU and ranked again by their registers, spills and occupancy; the best one that "
        "runs correctly on the CPU becomes a row (a tuned problem and its kernel) of the library. "
        "Such a row is marked as predicted wherever it is shown, never replaces a measured row, "
        "and is replaced by the first tune on that GPU. --judge evaluates the model.",
    "worker":
        "Join the tunes that `kgen tune --storage URL` runs on other machines: take trials of "
        "their problems, compile, verify and time them on this machine's GPU, and send the "
        "records. The process that was started by kgen tune writes the library. A worker with "
        "another GPU model searches the same problems for its own GPU. After Ctrl-C or SIGTERM the "
        "worker finishes the running trial and releases its other trials.",
    "learn":
        "Learn which row (a tuned problem and its kernel) of the library serves problems that were "
        "not tuned. kgen generates training problems near the tuned ones, times the kernels of the "
        "rows on each, and writes a decision tree into the table. A kernel that the tree "
        "chooses and that has no row is added as a row.",
    "verify":
        "Check kernels against the float64 definition, without timing them. By default kgen checks "
        "a few configs of every variant and the fastest config of earlier tunes, on each problem "
        "and with all input cases. --record checks the config of that record with the inputs of "
        "that record. --library checks the kernels that an emitted library runs.",
    "bench":
        "Verify and time tuned kernels again, interleaved with other implementations of the "
        "operator (peers). For a problem without a tuned kernel, the safe kernel is timed. The "
        "library and the reports are not changed.",
    "measure-check":
        "Measure how well timings repeat on this machine: a kernel against itself, and the winners "
        "of several independent tunes against each other. Everything is done in temporary folders.",
    "report":
        "Print the reports of earlier tunes: a screen per operator with the time of each problem, "
        "the fastest peer and the share of the floor (floor over time; the floor is the least time "
        "that memory bandwidth or the peak rate allows). With --problem or --full: everything "
        "about a problem. Or write a page with figures (--html), tables or a picture.",
    "import-cache":
        "Read searches that other tuners recorded, and write each as an Optuna study. The files "
        "are T4 results or Kernel Tuner caches, as kgen report --t4 writes them.",
    "package":
        "Write a wheel of the tuned library, with cubins for the chosen architectures. The same "
        "library gives the same bytes each time.",
    "explain":
        "Show which kernel of the library serves a problem, and the verification and times behind "
        "it. The GPU that --gpu names need not be in this machine.",
    "coverage":
        "Ask the library which kernel serves each problem of a population (the problems that "
        "published models call), and by which dispatch step. Unless --steps is given, verify that "
        "kernel for the problem, and time it, a call of the library and the peers in one "
        "interleaved run. The last table has the number of problems of each step, and the "
        "geometric mean, tenth percentile and worst of the ratios to the fastest peer. --sample N "
        "searches N problems and prints how much slower the library's kernel is than the best "
        "config found (docs/coverage.md).",
    "emit":
        "Render every kernel of the library again from the current templates. A row (a tuned "
        "problem and its kernel) whose machine code is unchanged keeps its record and its times. A "
        "row with other code is stale: it keeps the kernel that was measured, and is listed with "
        "the command that tunes it again. Exit code: 0 if all rows are valid, 3 if some are stale.",
    "ops": "List the operators that kgen finds, with their passes and variants.",
    "new-op":
        "Write the files of a new operator: a definition, a search space, and templates of a "
        "forward and a backward pass. It computes x * sigmoid(x) and can be tuned at once; then "
        "change it step by step (docs/tutorials/new-operator.md).",
    "gpus": "List the GPU profiles: the names that --gpu takes, with the facts that rules use.",
    "populations":
        "List the populations: named lists of the problems that published models call, with the "
        "source of each model. With a name: its models and its problems, as --problem takes them. "
        "A file of your own is checked and printed in the same way (docs/search-spaces.md).",
    "device-library":
        "Print the reference of the device library: the functions and types of namespace kgen that "
        "templates may use, with the comments of their headers.",
    "completion":
        "Print a function for your shell. With it the TAB key completes commands, options, "
        "operators, GPUs, populations, and the dims and dtypes of problems.",
    "doctor": "Show what is installed, what works, and what to do about what is missing.",
}

# command -> (what it does, command line)
EXAMPLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "tune": (
        ("tune both passes of wkv6 on the first GPU, or on the CPU if there is none",
         "kgen tune --op wkv6 --gpu auto"),
        ("one problem of one pass, at most 100 trials",
         "kgen tune --op rmsnorm --pass forward --problem M=8192,N=4096,dtype=bf16 --trials 100"),
        ("all problems of an operator within ten minutes, into another folder",
         "kgen tune --op linear_attention --time 10m --out build/library"),
        ("all problems of both passes of wkv6 that published models call",
         "kgen tune --population rwkv6 --gpu auto"),
        ("the problems of your own models, within an hour",
         "kgen tune --population mine/models.yaml --op rmsnorm --time 1h"),
        ("the problems that `kgen_ops.capture(\"calls.yaml\")` recorded, most expensive first",
         "kgen tune --calls calls.yaml --gpu auto"),
        ("an operator of your own",
         "kgen tune --op softmax --path docs/tutorials/softmax --gpu host"),
        ("on every GPU of this machine",
         "kgen tune --op wkv6 --devices all"),
        ("with every `kgen worker` of a database; PGPASSWORD holds the password",
         "kgen tune --op wkv6 --storage postgresql://kgen@db.example/kgen"),
    ),
    "worker": (
        ("help every tune of a database, until Ctrl-C",
         "kgen worker --storage postgresql://kgen@db.example/kgen --gpu auto"),
        ("a worker for device 1 that ends after ten minutes without work",
         "kgen worker --storage postgresql://kgen@db.example/kgen --device 1 --idle 10m"),
    ),
    "predict": (
        ("rows of both passes of wkv6 for an A100, on a machine without one",
         "kgen predict --op wkv6 --gpu a100"),
        ("one problem, with more configs compiled",
         "kgen predict --op rmsnorm --gpu a100 --problem M=8192,N=4096,dtype=bf16 --compiled 64"),
        ("evaluate the models on all recorded searches",
         "kgen predict --judge"),
    ),
    "learn": (
        ("learn which rows serve untuned shapes, and judge it on four held-out problems",
         "kgen learn --op rmsnorm --pass forward --held-out 4"),
        ("add rows and a learnt rule for a row length that was not tuned",
         "kgen learn --op rmsnorm --problem M=8192,N=5120,dtype=bf16"),
    ),
    "verify": (
        ("a few configs of each variant, on the CPU, under AddressSanitizer too",
         "kgen verify --op timex --gpu host --sanitize"),
        ("repeat the certificate of a row of the library, with the same inputs",
         "kgen verify --op rmsnorm --gpu h200 --record d7e04025"),
        ("every row of the library, and 40 problems that were not tuned",
         "kgen verify --op rmsnorm --gpu h200 --library --array 40"),
    ),
    "bench": (
        ("tuned kernels and all installed peers",
         "kgen bench --op rmsnorm --gpu auto --problem M=32768,N=8192,dtype=bf16"),
        ("with two peers, written to a file",
         "kgen bench --op rmsnorm --against eager,liger --yaml bench.yaml"),
        ("a published step-by-step table, on this GPU",
         "kgen bench --op rmsnorm --ladder --problem M=262144,N=4096,dtype=fp32"),
        ("host time of a call",
         "kgen bench --op rmsnorm --call-cost --pass forward --problem M=64,N=4096,dtype=bf16"),
        ("a trace for Perfetto or TensorBoard",
         "kgen bench --op wkv6 --profile --pass forward"),
    ),
    "measure-check": (
        ("three tunes, and five comparisons of a kernel with itself, on one problem",
         "kgen measure-check --gpu auto --problem M=8192,N=4096,dtype=bf16"),
        ("a short check: one tune, two runs",
         "kgen measure-check --gpu auto --tunes 1 --runs 2"),
    ),
    "report": (
        ("a screen per operator", "kgen report"),
        ("one pass, all its problems", "kgen report --op rmsnorm --gpu h200 --pass forward"),
        ("all about the problems in bf16 with a residual",
         "kgen report --op rmsnorm --problem 'bf16 +residual'"),
        ("a page with figures, for a browser", "kgen report --html report.html"),
        ("for a spreadsheet", "kgen report --csv"),
        ("compare with an older report",
         "kgen report --op rmsnorm --against before/h200.yaml"),
        ("the same page, with maps of the kernels for all problems of a population",
         "kgen report --html report.html --coverage rmsnorm.yaml --coverage wkv6.yaml"),
        ("all searches of an operator for optuna-dashboard",
         "kgen report --op wkv6 --optuna wkv6.log"),
        ("write the tables, the picture and the README's short table",
         "kgen report --gpu h200 --markdown docs/results.md --svg docs/results.svg "
         "--summary README.md"),
    ),
    "import-cache": (
        ("look at a Kernel Tuner cache in optuna-dashboard",
         "kgen import-cache convolution_A100.json --optuna convolution.log"),
    ),
    "package": (
        ("a wheel with cubins of two architectures",
         "kgen package --arch sm_80,sm_90a --wheel dist"),
        ("a wheel that needs no compilation for the problems of RWKV-6 models",
         "kgen package --arch sm_90a --population rwkv6 --wheel dist"),
    ),
    "explain": (
        ("which row serves this call on an H200, which need not be in this machine",
         "kgen explain --op rmsnorm --problem M=100,N=4096,dtype=bf16 --gpu h200"),
    ),
    "emit": (
        ("add an operator before its first tune; its calls run untuned kernels",
         "kgen emit --add wkv6"),
        ("after an edit of a template, a header or a search space, a merge, or an update of kgen",
         "kgen emit"),
        ("a library in another folder", "kgen emit --out build/library"),
    ),
    "ops": (
        ("operators, passes and variants", "kgen ops"),
        ("with those of your own", "kgen ops --path docs/tutorials/softmax"),
    ),
    "new-op": (
        ("write the files under mine/; try them: kgen tune --op swish --path mine --trials 4",
         "kgen new-op swish --path mine"),
    ),
    "coverage": (
        ("the dispatch step of all problems on an A100, which need not be in this machine",
         "kgen coverage --op wkv6 --gpu a100 --steps"),
        ("times beside all peers, and the loss on 40 problems that are searched",
         "kgen coverage --op rmsnorm --gpu auto --sample 40 --yaml coverage.yaml"),
        ("the problems that your own model calls", "kgen coverage --calls calls.yaml --gpu auto"),
    ),
    "populations": (
        ("names for --population", "kgen populations"),
        ("models and problems of one", "kgen populations rmsnorm --pass backward"),
        ("check a file of your own", "kgen populations mine/models.yaml"),
    ),
    "gpus": (("names for --gpu", "kgen gpus"),),
    "device-library": (
        ("rewrite the page after an edit of a header",
         "kgen device-library --markdown docs/device-library.md"),
    ),
    "completion": (
        ('for ~/.bashrc: eval "$(kgen completion bash)"', "kgen completion bash"),
        ('for ~/.zshrc, below compinit: eval "$(kgen completion zsh)"', "kgen completion zsh"),
        ("for ~/.config/fish/config.fish: kgen completion fish | source",
         "kgen completion fish"),
    ),
    "doctor": (("installed tools, and how to install missing ones", "kgen doctor"),),
}

FIRST = (
    ("tune, on the first GPU or on the CPU", "kgen tune --op wkv6 --gpu auto"),
    ("print its results", "kgen report"),
    ("compare it with its peers", "kgen bench --op wkv6 --gpu auto"),
    ("all options of a command, with examples", "kgen tune --help"),
)


def description(command: str) -> str:
    """The text above the options of a command's `--help`."""
    return textwrap.fill(DESCRIPTIONS.get(command, ""), 80)


def epilog(examples: tuple[tuple[str, str], ...]) -> str:
    """The text after the options of a `--help`."""
    lines = [f"  # {purpose}\n  {line}" for purpose, line in examples]
    return "examples:\n" + "\n".join(lines)
