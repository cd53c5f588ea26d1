"""Runs trials on a device: load, verify, and only then time."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from kgen.errors import LaunchError
from kgen.launch import Module, open_device
from kgen.measure.clocks import clocks, driver_version
from kgen.measure.compare import compare
from kgen.measure.memory import cache_state, copy_bandwidth, sets_needed
from kgen.measure.timing import BUDGETS, measure
from kgen.model.digest import digest_of_text
from kgen.model.plan import Workspace, make_plan
from kgen.model.problem import Problem
from kgen.model.record import Fate
from kgen.operators.base import Operator
from kgen.runtime import launcher
from kgen.runtime.cache import Cache
from kgen.runtime.launcher import provide_extension
from kgen.verify import Fixture, Verdict, verify
from kgen.worker.messages import (
    Candidate,
    Finals,
    FinalsOutcome,
    ProbeOutcome,
    Setup,
    Trial,
    TrialOutcome,
)

Tensors = dict[str, torch.Tensor]
Call = Callable[[], None]

FINAL_ROUNDS = 41
FINAL_BUDGET_MS = 800.0  # of all finalists and peers together


class Runner:
    """The worker's state: the device, and what is kept for the current problem."""

    def __init__(self, operator: Operator, setup: Setup) -> None:
        """Open the device.

        Raises:
            GpuError, LaunchError: If it cannot be used.
        """
        self._operator = operator
        self._gpu = setup.gpu
        self._seed = setup.seed
        self._device = open_device(setup.gpu, setup.ordinal)
        if not setup.gpu.is_host:
            # A graph of a tiny kernel is hundreds of launches to capture.
            provide_extension(_extension_folder())
        self._current: tuple[str, Problem] | None = None
        self._fixture: Fixture | None = None
        self._sets: list[Tensors] = []
        self._cache_state = ""

    def usable(self) -> bool:
        """Whether the device still answers after an error."""
        try:
            self._device.synchronize()
        except LaunchError:
            return False
        return True

    def probe(self) -> ProbeOutcome:
        """Read the machine's facts and measure its copy bandwidth."""
        facts = {"torch": str(torch.__version__), **_device_facts(self._device.torch_device)}
        return ProbeOutcome(facts, copy_bandwidth(self._device.torch_device))

    def trial(self, trial: Trial) -> TrialOutcome:
        """Verify one candidate, then time it."""
        fixture = self._fixture_for(trial.pass_name, trial.problem)
        module = self._device.load(trial.candidate.artifact)
        try:
            verdict = self._verify(fixture, module, trial)
            if not verdict.ok:
                return TrialOutcome(
                    Fate.WRONG, verdict.reason, None, verdict.accuracy, cases=verdict.cases
                )
            timing = None
            if trial.measure:
                calls = self._calls(module, trial.candidate, trial.pass_name, trial.problem)
                timing = measure(
                    calls,
                    self._device.torch_device,
                    BUDGETS["search"],
                    give_up_above_us=trial.give_up_above_us,
                    cache=self._cache_state,
                )
            return TrialOutcome(
                Fate.VERIFIED,
                "",
                timing,
                verdict.accuracy,
                self._occupancy(module, trial.candidate, trial.problem),
                verdict.cases,
            )
        finally:
            self._device.synchronize()
            module.close()

    def finals(self, finals: Finals) -> FinalsOutcome:
        """Time the candidates and the operator's peers, interleaved."""
        self._fixture_for(finals.pass_name, finals.problem).release()  # memory for the sets
        modules = [self._device.load(c.artifact) for c in finals.candidates]
        try:
            entrants: dict[str, Sequence[Call]] = {
                str(i): self._calls(module, candidate, finals.pass_name, finals.problem)
                for i, (module, candidate) in enumerate(
                    zip(modules, finals.candidates, strict=True)
                )
            }
            errors: dict[str, str] = {}
            if finals.peers:
                for name, peer in self._peers(finals.pass_name, errors).items():
                    entrants[f"peer {name}"] = peer
            result = compare(
                entrants,
                self._device.torch_device,
                rounds=FINAL_ROUNDS,
                budget_ms=FINAL_BUDGET_MS,
                seed=self._seed,
                cache=self._cache_state,
            )
            own = [str(i) for i in range(len(modules))]
            return FinalsOutcome(
                timings=tuple(result.timings[name] for name in own),
                samples_us=tuple(result.samples[name] for name in own),
                peers={
                    name.removeprefix("peer "): timing
                    for name, timing in result.timings.items()
                    if name.startswith("peer ")
                },
                peer_errors=errors,
                clocks=_clock_texts(self._device.torch_device),
            )
        finally:
            self._device.synchronize()
            for module in modules:
                module.close()

    def _verify(self, fixture: Fixture, module: Module, trial: Trial) -> Verdict:
        candidate = trial.candidate
        guards = [rule.condition for rule in candidate.variant.guards]
        fixed: dict[str, object] = {**self._gpu.names, **candidate.config.as_dict()}
        pass_ = self._operator.signature.pass_named(trial.pass_name)

        def admits(numbers: Mapping[str, int | str], tensors: Mapping[str, torch.Tensor]) -> bool:
            pointers = dict.fromkeys((f"{t.name}_ptr" for t in pass_.tensors), 0)
            pointers |= {f"{name}_ptr": t.data_ptr() for name, t in tensors.items()}
            env = {**fixed, **numbers, **pointers}
            return all(guard(env) for guard in guards)

        def workspaces(problem: Problem) -> Sequence[Workspace]:
            return make_plan(candidate.variant, candidate.config, problem, self._gpu).workspaces

        return verify(
            fixture,
            lambda tensors: self._bind(module, candidate, trial.pass_name, trial.problem, tensors),
            "certify" if trial.certify else "trial",
            workspaces=workspaces,
            admits=admits,
            constants=candidate.variant.constants,
        )

    def _bind(
        self,
        module: Module,
        candidate: Candidate,
        pass_name: str,
        problem: Problem,
        tensors: Mapping[str, torch.Tensor],
    ) -> Callable[[], None]:
        """Bind a candidate to tensors, whose extents may differ from the problem's."""
        numbers = self._numbers(pass_name, problem, tensors)
        dims = tuple((name, int(numbers[name])) for name, _ in problem.dims)
        plan = make_plan(
            candidate.variant, candidate.config, Problem(dims, problem.dtypes), self._gpu
        )
        return module.bind(plan, {**self._absent(pass_name, problem), **tensors}, numbers)

    def _absent(self, pass_name: str, problem: Problem) -> dict[str, None]:
        """The tensors that a problem leaves out."""
        pass_ = self._operator.signature.pass_named(pass_name)
        present = problem.present(pass_).tensors
        return {t.name: None for t in pass_.tensors if t not in present}

    def _numbers(
        self, pass_name: str, problem: Problem, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, int | float]:
        """Scalars, dims and strides of a call, by the names that kernels take them by."""
        pass_ = self._operator.signature.pass_named(pass_name)
        numbers: dict[str, int | float] = {
            **self._operator.scalars(pass_name),
            **dict(problem.dims),
        }
        for declared in pass_.tensors:
            tensor = tensors.get(declared.name)
            for i, dim in enumerate(declared.dims):
                if tensor is not None:
                    numbers[dim] = tensor.shape[i]
                if dim in declared.free_strides:
                    stride = 0 if tensor is None else tensor.stride(i)
                    numbers[f"{declared.name}_stride_{dim}"] = stride
        return numbers

    def _calls(
        self, module: Module, candidate: Candidate, pass_name: str, problem: Problem
    ) -> list[Call]:
        """One bound call per buffer set."""
        plan = make_plan(candidate.variant, candidate.config, problem, self._gpu)
        numbers: dict[str, int | float] = {}
        absent = self._absent(pass_name, problem)
        calls = []
        for tensors in self._buffer_sets(pass_name, problem):
            scratch = {
                w.name: torch.empty(
                    w.elements,
                    dtype=_torch_dtype(problem, w.dtype),
                    device=self._device.torch_device,
                )
                for w in plan.workspaces
            }
            # All sets have the same extents and strides; there may be hundreds of them.
            numbers = numbers or self._numbers(pass_name, problem, tensors)
            calls.append(module.bind(plan, {**absent, **tensors, **scratch}, numbers))
        return calls

    def _buffer_sets(self, pass_name: str, problem: Problem) -> list[Tensors]:
        """Inputs and outputs of the problem, in enough copies to overflow the L2 cache."""
        self._fixture_for(pass_name, problem)
        if not self._sets:
            pass_ = problem.present(self._operator.signature.pass_named(pass_name))
            bytes_per_set = sum(
                math.prod(problem.shape(t.dims)) * problem.dtype(t.dtype).itemsize
                for t in pass_.tensors
            )
            device = self._device.torch_device
            memory = self._gpu.memory_bytes
            if device.type == "cuda":
                memory = torch.cuda.mem_get_info(device)[0]
            count = sets_needed(bytes_per_set, self._gpu.l2_bytes, memory // 2)
            self._cache_state = cache_state(count, bytes_per_set, self._gpu.l2_bytes)
            generator = torch.Generator(device=device).manual_seed(self._seed)
            for _ in range(count):
                tensors: Tensors = dict(
                    self._operator.make_inputs(pass_name, problem, "normal", generator, device)
                )
                for output in pass_.outputs:
                    tensors[output.name] = torch.empty(
                        problem.shape(output.dims),
                        dtype=_torch_dtype(problem, output.dtype),
                        device=device,
                    )
                self._sets.append(tensors)
        return self._sets

    def _peers(self, pass_name: str, errors: dict[str, str]) -> dict[str, Sequence[Call]]:
        """Calls of the operator's peers on the same buffer sets; those that fail are named."""
        assert self._current is not None
        scalars = self._operator.scalars(pass_name)
        working: dict[str, Sequence[Call]] = {}
        # On a machine without a GPU, compiling a peer warns that it found no CUDA runtime.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        for name, peer in self._operator.peers(pass_name).items():
            calls = [_peer_call(peer, tensors, scalars) for tensors in self._sets]
            try:
                for _ in range(3):  # a compiled peer compiles here, not while it is timed
                    calls[0]()
                self._device.synchronize()
            except Exception as problem:  # a peer may fail in any way; it is reported, not hidden
                errors[name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
                continue
            working[name] = calls
        return working

    def _occupancy(self, module: Module, candidate: Candidate, problem: Problem) -> float | None:
        plan = make_plan(candidate.variant, candidate.config, problem, self._gpu)
        launches = [x for x in plan.launches if not x.is_empty]
        if self._gpu.is_host or not launches:
            return None
        first = launches[0]
        blocks = module.occupancy(first.kernel, first.threads, first.smem_bytes)
        return blocks * first.threads / self._gpu.max_threads_per_sm

    def _fixture_for(self, pass_name: str, problem: Problem) -> Fixture:
        if self._fixture is None or self._current != (pass_name, problem):
            self._sets.clear()
            self._fixture = None  # give its memory back before the next one measures what is free
            if self._device.torch_device.type == "cuda":
                torch.cuda.empty_cache()
            self._fixture = Fixture(
                self._operator, pass_name, problem, self._device.torch_device, seed=self._seed
            )
            self._current = (pass_name, problem)
        return self._fixture


def _extension_folder() -> Path:
    """Where this version's compiled launcher is kept."""
    source = Path(launcher.__file__).with_name("_launch.c").read_text(encoding="utf-8")
    folder = Cache().directory / "launcher" / digest_of_text(source)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _peer_call(
    peer: Callable[[Mapping[str, torch.Tensor], Mapping[str, float]], object],
    tensors: Tensors,
    scalars: Mapping[str, float],
) -> Call:
    def call() -> None:
        with torch.no_grad():
            peer(tensors, scalars)

    return call


def _torch_dtype(problem: Problem, name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, problem.dtype(name).torch)
    return dtype


def _clock_texts(device: torch.device) -> dict[str, str]:
    """Clock state right after a run, while the GPU is still warm from it."""
    state = clocks(device)
    if state is None:
        return {}
    return {
        "sm_mhz": f"{state.sm_mhz} of {state.sm_max_mhz}",
        "memory_mhz": str(state.memory_mhz),
        "temperature_c": str(state.temperature_c),
        "power_w": f"{state.power_w:.0f}",
        "throttle": ", ".join(state.throttle) or "none",
    }


def _device_facts(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {
            "device": platform.processor() or platform.machine(),
            "threads": str(torch.get_num_threads()),
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "sms": str(properties.multi_processor_count),
        "cuda": str(torch.version.cuda),
        "driver": driver_version(),
    }
