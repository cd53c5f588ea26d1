"""Runs trials on a device: loads a kernel, verifies it, and only then times it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from kgen.check import PROOF_SIZES, Fixture, Sizes, Verdict
from kgen.errors import LaunchError, VerifyError
from kgen.launch import Module, open_device
from kgen.launch.host import HostDevice
from kgen.measure.clocks import clocks
from kgen.measure.compare import Comparison, compare
from kgen.measure.memory import copy_bandwidth
from kgen.measure.timing import BUDGETS, measure
from kgen.model.plan import make_plan
from kgen.model.problem import Problem
from kgen.model.record import RANDOM, TRAINED, Fate, Timing
from kgen.operators.base import Operator
from kgen.runtime.extension import provide_extensions
from kgen.worker.binding import (
    Call,
    Tensors,
    bind_sets,
    buffer_sets,
    shared_scratch,
)
from kgen.worker.calling import cost_of_calls
from kgen.worker.contest import LIBRARY, PEER, Calls, compared, split_by_inputs
from kgen.worker.facts import (
    clock_texts,
    device_facts,
    extension_folder,
    is_out_of_memory,
    total_memory,
)
from kgen.worker.inputs import inputs_of, slower_of, trained_sets
from kgen.worker.library import library_calls
from kgen.worker.messages import (
    CallCosts,
    CallCostsOutcome,
    Candidate,
    Finals,
    FinalsOutcome,
    PeerNames,
    PeerNamesOutcome,
    ProbeOutcome,
    Setup,
    Trace,
    TraceOutcome,
    Trial,
    TrialOutcome,
)
from kgen.worker.peers import peer_accuracy, peer_calls
from kgen.worker.proof import evidence_of, verdict_of
from kgen.worker.timed import Timed
from kgen.worker.tracing import KERNEL, LIBRARY_CALL, traced

FINAL_ROUNDS = 41
FINAL_BUDGET_MS = 800.0  # device time of all finalists and peers together, per kind of inputs


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Run torch on one thread, for oracles on the CPU.

    They consist of many operations on small tensors, each of which would wait until all threads
    wake up: next to another busy process that took 15 times as long.
    """
    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Runner:
    """The worker's state: the device, and the cached data of the current problem."""

    def __init__(self, operator: Operator, setup: Setup, sizes: Sizes | None = None) -> None:
        """Open the device.

        Args:
            operator: The operator to run.
            setup: The setup of the worker.
            sizes: Sizes of the sets other than the problem itself; None: a default by device.
        Raises:
            GpuError, LaunchError: If the device cannot be used.
        """
        self._operator = operator
        self._sizes = sizes
        self._gpu = setup.gpu
        self._seed = setup.seed
        self._l2 = setup.l2
        self._device = HostDevice() if setup.on_host else open_device(setup.gpu, setup.ordinal)
        self._memory_bytes = setup.memory_bytes
        if self._device.torch_device.type == "cuda":
            # The C launcher speeds up capturing graphs: for a tiny kernel, hundreds of launches.
            provide_extensions(extension_folder())
            if setup.memory_bytes is not None:
                total = torch.cuda.mem_get_info(self._device.torch_device)[1]
                share = min(1.0, setup.memory_bytes / total)
                torch.cuda.set_per_process_memory_fraction(share, self._device.torch_device)
        self._current: tuple[object, ...] = ()
        self._fixture: Fixture | None = None
        self._sets: dict[str, list[Tensors]] = {}  # buffer sets by kind of inputs
        self._cache_state = ""

    def usable(self) -> bool:
        """Whether the device still answers after an error."""
        try:
            self._device.synchronize()
        except LaunchError:
            return False
        return True

    def probe(self) -> ProbeOutcome:
        """Read the machine's facts and measure the device's copy bandwidth."""
        facts = {"torch": str(torch.__version__), **device_facts(self._device.torch_device)}
        return ProbeOutcome(facts, copy_bandwidth(self._device.torch_device))

    def peer_names(self, request: PeerNames) -> PeerNamesOutcome:
        """List the peers that `finals` could time."""
        return PeerNamesOutcome(tuple(self._operator.peers(request.pass_name)))

    def trial(
        self, trial: Trial, begins: Callable[[int], None] = lambda place: None
    ) -> TrialOutcome:
        """Verify one candidate, then time it.

        Args:
            trial: The trial.
            begins: Called with the index of each input set in the schedule, before it is made.
        Raises:
            LaunchError: If a launch fails.
            VerifyError: If the operator's module is at fault, or the problem does not fit into
                memory.
        """
        refusal = self._memory_refusal(trial)
        if refusal:
            return TrialOutcome(Fate.REJECTED, refusal)
        seed = trial.seeds[0] if trial.seeds else self._seed
        small = trial.level == "host"
        fixture = self._fixture_for(trial.pass_name, trial.problem, seed, small)
        threads = 0
        if isinstance(self._device, HostDevice):
            self._device.orders = trial.orders or (0,)
            threads = self._device.threads
            self._device.threads = trial.threads or threads
            self._device.comparisons = Path(trial.comparisons) if trial.comparisons else None
        module = self._device.load(trial.candidate.artifact)
        try:
            with _one_thread(self._device.torch_device):
                verdict = self._verified(fixture, module, trial, begins)
            evidence = None
            if trial.level != "trial":
                evidence = evidence_of(trial, seed, verdict, self._on_host)
            sets = None if trial.part is None else verdict.results
            if not verdict.ok:
                return TrialOutcome(
                    Fate.WRONG, verdict.reason, None, verdict.accuracy, evidence=evidence,
                    sets=sets,
                )
            timing = None
            if trial.measure:
                timed = self._timed(module, trial.candidate, trial.pass_name, trial.problem)
                made = fixture.input_set(fixture.schedule.whole())
                timed.prepare(fixture, made)
                timing = self._time(module, timed, trial)
                if fault := timed.fault(fixture, made):
                    return TrialOutcome(Fate.WRONG, fault, None, verdict.accuracy)
            return TrialOutcome(
                Fate.VERIFIED, "", timing, verdict.accuracy, evidence, sets=sets)
        finally:
            self._device.synchronize()
            module.close()
            if isinstance(self._device, HostDevice):
                self._device.threads = threads

    def finals(self, finals: Finals) -> FinalsOutcome:
        """Time the candidates and the operator's peers, interleaved."""
        fixture = self._fixture_for(finals.pass_name, finals.problem)
        accuracy = {}
        if finals.compare_peers:
            accuracy = peer_accuracy(self._operator, finals, fixture, self._device.synchronize)
        whole = fixture.schedule.whole()
        fixture.release(keep=whole if finals.check_outputs else None)  # frees memory for the sets
        modules = [self._device.load(c.artifact) for c in finals.candidates]
        try:
            timed = [
                self._timed(module, candidate, finals.pass_name, finals.problem)
                for module, candidate in zip(modules, finals.candidates, strict=True)
            ]
            if finals.check_outputs:
                for kernel in timed:
                    kernel.prepare(fixture, fixture.input_set(whole))
            entrants: dict[str, Calls] = {
                str(i): {
                    inputs: self._calls(module, kernel, candidate, finals, inputs)
                    for inputs in self._sets
                }
                for i, (module, candidate, kernel) in enumerate(
                    zip(modules, finals.candidates, timed, strict=True)
                )
            }
            sets = [tensors for of_inputs in self._sets.values() for tensors in of_inputs]
            peers, errors = peer_calls(self._operator, finals, sets, self._device.synchronize)
            for name, peer in peers.items():
                entrants[PEER + name] = split_by_inputs(peer, self._sets)
            if finals.library:
                called = library_calls(
                    Path(finals.library), self._operator, finals.pass_name, sets,
                    self._operator.options(finals.problem),
                )
                entrants[LIBRARY] = split_by_inputs(called, self._sets)
            outcome = compared(entrants, self._compare)
            faults: list[str] = []
            if finals.check_outputs:
                faults = [kernel.fault(fixture, fixture.input_set(whole)) for kernel in timed]
            return replace(
                outcome,
                peer_errors=errors,
                peer_accuracy=accuracy,
                faults=tuple(faults),
                occupancy=tuple(
                    self._occupancy(module, candidate, finals.problem)
                    for module, candidate in zip(modules, finals.candidates, strict=True)
                ),
            )
        finally:
            self._device.synchronize()
            for module in modules:
                module.close()

    def trace(self, request: Trace) -> TraceOutcome:
        """Trace the candidate, the library's function and the operator's peers.

        Raises:
            StorageError: If the trace cannot be written.
        """
        finals = request.finals
        self._fixture_for(finals.pass_name, finals.problem).release()
        (candidate,) = finals.candidates
        module = self._device.load(candidate.artifact)
        try:
            kernel = self._timed(module, candidate, finals.pass_name, finals.problem).calls
            synchronize = self._device.synchronize
            sets = self._sets[RANDOM]
            peers, errors = peer_calls(self._operator, finals, sets, synchronize, slow=True)
            library: list[Call] = []
            if finals.library:
                library = library_calls(
                    Path(finals.library), self._operator, finals.pass_name, sets,
                    self._operator.options(finals.problem),
                )
                library[0]()  # exclude the preparations of the first call
            contenders = {KERNEL: kernel, **({LIBRARY_CALL: library} if library else {}), **peers}
            return traced(contenders, errors, self._device.torch_device, request.path, synchronize)
        finally:
            self._device.synchronize()
            module.close()

    def call_costs(self, request: CallCosts) -> CallCostsOutcome:
        """Measure the host time of calls of the library's function and of the operator's peers."""
        self._fixture_for(request.pass_name, request.problem).release()
        tensors = self._buffer_sets(request.pass_name, request.problem)[RANDOM][0]
        return cost_of_calls(
            self._operator, request, tensors, self._device.torch_device, self._device.synchronize
        )

    def _compare(
        self, entrants: Mapping[str, Sequence[Call]]
    ) -> tuple[Comparison, dict[str, str]]:
        """Time entrants side by side; repeat once if power or heat throttled the clocks."""
        device = self._device.torch_device
        for _ in range(2):
            before = clocks(device)
            result = compare(
                entrants,
                device,
                rounds=FINAL_ROUNDS,
                budget_ms=FINAL_BUDGET_MS * len(inputs_of(self._operator)),
                seed=self._seed,
                cache=self._cache_state,
            )
            after = clocks(device)  # read at once, while the GPU is still under load
            slowed = {reason for state in (before, after) if state for reason in state.slowed_by}
            if not slowed:
                break
        texts = clock_texts(after)
        if slowed:
            texts["slowed"] = ", ".join(sorted(slowed))
        return result, texts

    @property
    def _on_host(self) -> bool:
        return isinstance(self._device, HostDevice)

    def _verified(
        self, fixture: Fixture, module: Module, trial: Trial, begins: Callable[[int], None]
    ) -> Verdict:
        try:
            return verdict_of(
                fixture, module, trial, self._operator, self._gpu, on_host=self._on_host,
                begins=begins,
            )
        except (RuntimeError, MemoryError) as problem:
            if not is_out_of_memory(problem):
                raise
            # The workspaces were checked to fit, so the memory that every candidate needs is short.
            raise VerifyError(
                f"{trial.problem} does not fit: inputs, outputs and what verifying them takes "
                f"need more device memory than there is{self._limit_text()}\n"
                f"  {str(problem).splitlines()[0]}\n"
                "  choose a smaller problem, or a larger --device-memory"
            ) from None

    def _memory_refusal(self, trial: Trial) -> str:
        """Why the candidate's scratch memory cannot be allocated; empty if it can."""
        candidate = trial.candidate
        plan = make_plan(candidate.variant, candidate.config, trial.problem, self._gpu)
        wanted = sum(w.elements * trial.problem.dtype(w.dtype).itemsize for w in plan.workspaces)
        there = total_memory(self._device.torch_device)
        if self._memory_bytes is not None:
            there = min(there, self._memory_bytes)
        if wanted <= there // 2:
            return ""
        return (
            f"needs {wanted / 2**30:.3g} GiB of workspace; trials may take half of the device's "
            f"{there / 2**30:.3g} GiB{self._limit_text()}"
        )

    def _limit_text(self) -> str:
        if self._memory_bytes is None:
            return ""
        return f" (limit on device memory: {self._memory_bytes / 2**30:.3g} GiB)"

    def _timed(
        self, module: Module, candidate: Candidate, pass_name: str, problem: Problem
    ) -> Timed:
        """One bound call per buffer set."""
        plan = make_plan(candidate.variant, candidate.config, problem, self._gpu)
        # Allocated before the sets, whose number depends on the free memory.
        scratch = shared_scratch(plan, problem, self._device.torch_device)
        sets = self._buffer_sets(pass_name, problem)[RANDOM]
        calls = bind_sets(module, plan, self._operator, pass_name, problem, sets, scratch)
        return Timed(calls, sets[0], scratch)

    def _calls(
        self,
        module: Module,
        timed: Timed,
        candidate: Candidate,
        asked: Trial | Finals,
        inputs: str,
    ) -> Sequence[Call]:
        """The calls of a kernel on one kind of inputs, one for each buffer set."""
        if inputs == RANDOM:
            return timed.calls
        plan = make_plan(candidate.variant, candidate.config, asked.problem, self._gpu)
        sets = self._buffer_sets(asked.pass_name, asked.problem)[inputs]
        return bind_sets(
            module, plan, self._operator, asked.pass_name, asked.problem, sets, timed.scratch
        )

    def _time(self, module: Module, timed: Timed, trial: Trial) -> Timing:
        """Time a candidate on all inputs; only on random ones if it is too slow there."""
        found: dict[str, Timing] = {}
        for inputs in inputs_of(self._operator):
            limit_us = trial.trained_below_us
            if found and limit_us is not None and found[RANDOM].median_us > limit_us:
                break
            found[inputs] = measure(
                self._calls(module, timed, trial.candidate, trial, inputs),
                self._device.torch_device,
                BUDGETS["search"],
                give_up_above_us=trial.give_up_above_us,
                cache=self._cache_state,
            )
        return slower_of(found)

    def _buffer_sets(self, pass_name: str, problem: Problem) -> dict[str, list[Tensors]]:
        """The buffer sets of the current problem by kind of inputs; made at the first request."""
        self._fixture_for(pass_name, problem)
        if not self._sets:
            sets, self._cache_state = buffer_sets(
                self._operator, self._gpu, pass_name, problem, self._l2,
                self._seed, self._device.torch_device,
            )
            self._sets = {RANDOM: sets}
            if self._operator.trained is not None:
                self._sets[TRAINED] = trained_sets(
                    self._operator, pass_name, problem, sets, self._seed
                )
        return self._sets

    def _occupancy(self, module: Module, candidate: Candidate, problem: Problem) -> float | None:
        plan = make_plan(candidate.variant, candidate.config, problem, self._gpu)
        launches = [x for x in plan.launches if not x.is_empty]
        if self._device.torch_device.type != "cuda" or not launches:
            return None
        first = launches[0]
        blocks = module.occupancy(first.kernel, first.threads, first.smem_bytes)
        return blocks * first.threads / self._gpu.max_threads_per_sm

    def _fixture_for(
        self, pass_name: str, problem: Problem, seed: int | None = None, small: bool = False
    ) -> Fixture:
        wanted = (pass_name, problem, self._seed if seed is None else seed, small)
        if self._fixture is None or self._current != wanted:
            self._sets.clear()
            self._fixture = None  # free its memory before the next fixture reads the free memory
            if self._device.torch_device.type == "cuda":
                torch.cuda.empty_cache()
            self._fixture = Fixture(
                self._operator,
                pass_name,
                problem,
                self._device.torch_device,
                seed=wanted[2],
                sizes=PROOF_SIZES if small else self._sizes,
            )
            self._current = wanted
        return self._fixture
