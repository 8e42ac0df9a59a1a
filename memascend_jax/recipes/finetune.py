# SPDX-License-Identifier: Apache-2.0
"""A fine-tuning run from its configuration: load, plan, set up, train, save.

Everything that can be checked is checked before the first weight is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from numpy.typing import NDArray

from memascend_jax.checkpoints.export import export_huggingface
from memascend_jax.checkpoints.peft_adapter import export_adapter
from memascend_jax.config import Config, has_store, to_dict
from memascend_jax.data.batches import steps_of_epochs
from memascend_jax.data.dataset import Dataset
from memascend_jax.errors import ConfigError, MemascendError, RunError, StoppedError
from memascend_jax.memory.allocator import limit_heap_growth, trim_heap
from memascend_jax.memory.meter import Meter, take_sample
from memascend_jax.memory.pressure import MemoryWatch
from memascend_jax.observe.failure import say_at_once
from memascend_jax.observe.meter_log import MeterLog
from memascend_jax.observe.metrics import MetricsFile, read_lines
from memascend_jax.observe.report import read_summary
from memascend_jax.observe.screen import Screen
from memascend_jax.observe.trace import recording
from memascend_jax.recipes.checkpoint_space import (
    check_checkpoint_folder,
    check_checkpoint_space,
    checkpoint_space,
    prove_writable,
    saves_checkpoints,
)
from memascend_jax.recipes.checkpointing import RunCheckpoints, open_checkpoints
from memascend_jax.recipes.gauges import build_gauges, meter_facts
from memascend_jax.recipes.inputs import ModelSource, open_data, open_model
from memascend_jax.recipes.lora import base_name, check_lora_source
from memascend_jax.recipes.origin import Origin, check_origin, find_origin, with_way_back
from memascend_jax.recipes.planning import plan_config
from memascend_jax.recipes.resume import (
    Found,
    check_contents,
    check_scratch,
    check_tensors,
    content_digests,
    notes,
    sequences_read,
)
from memascend_jax.recipes.run_folder import RunFolder
from memascend_jax.recipes.run_store import check_whole, durability_note, open_store
from memascend_jax.recipes.run_summary import summarise
from memascend_jax.recipes.session import Session, open_arena, open_session
from memascend_jax.recipes.store_place import check_places
from memascend_jax.recipes.weight_range import check_weight_range, needs_look
from memascend_jax.storage.store_errors import DamagedStoreError
from memascend_jax.training.checkpoint_state import read_masters, restore_state
from memascend_jax.training.generate import generate_greedy
from memascend_jax.training.initialise import initialise_state
from memascend_jax.training.loop import StepData, Trainer, evaluate
from memascend_jax.training.plan import RunPlan
from memascend_jax.training.precompile import precompile_apart
from memascend_jax.training.run_state import RunState
from memascend_jax.training.stop import StopRequest
from memascend_jax.units import format_bytes

_SAMPLE_TOKENS = 32
#: Held-out sequences whose activations are held at once in an evaluation.
_EVAL_GROUP_TOKENS = 4096


@dataclass(slots=True)
class Run:
    """Everything of one run that its verbs pass on."""

    config: Config
    folder: RunFolder
    screen: Screen
    model: ModelSource
    data: Dataset
    plan: RunPlan
    total_steps: int
    state: RunState
    #: What the run goes on with or begins with.
    origin: Origin
    #: What saves checkpoints, once there is something to save; None: nothing is.
    checkpoints: RunCheckpoints | None = None
    #: The model as a stop left it, where there is no store to go on from.
    kept: Path | None = None
    #: What is under way and changes nothing that is kept, so that a stop need not wait for its end.
    looking: str | None = None

    @contextmanager
    def only_looks(self, doing: str) -> Iterator[None]:
        """Says that what is done within can be broken off and done again; where nothing is on disk it is worth more."""
        self.looking = doing if has_store(self.config) else None
        try:
            yield
        finally:
            self.looking = None

    @property
    def found(self) -> Found | None:
        """The run in the store that goes on; None: the store is a new one."""
        return self.origin.found

    @property
    def resumed(self) -> bool:
        return self.found is not None

    @property
    def is_complete(self) -> bool:
        return self.state.step >= self.total_steps and bool(self.state.results.get("finished"))


def run(config: Config) -> int:
    """Carries out the run that ``config`` describes and returns the exit status 0.

    Raises:
        MemascendError: with the exit status of its class; what is committed stays and can be resumed.
    """
    limit_heap_growth()
    with ExitStack() as stack:
        job = _load(config, stack)
        if job.is_complete:
            _show_again(job)
            return 0
        _check_weights(job)
        _check_store(job)
        _begin(job)
        # Until all parts are closed, so that a first Ctrl-C while a finished run closes does not make it a failure.
        stop = stack.enter_context(StopRequest(_say_stopping))
        try:
            watch = MemoryWatch(job.plan.memory.total_bytes, job.screen.say)
            session, trainer = _set_up(job, stack, partial(watch.wait, lambda: stop.requested), stop)
            _hold_up_stages(job, session, watch, stop)
            _train(job, session, trainer, stop)
            _save(job, session, stop)
        except StoppedError as error:
            job.folder.write_last_status("stopped", job.state.step, job.total_steps, str(error))
            raise _stopped(job, error) from None
        except BaseException as error:
            state, why = "failed", str(error) or repr(error)
            if isinstance(error, KeyboardInterrupt):
                state, why = "interrupted", _how_to_go_on(job)
            job.folder.write_last_status(state, job.state.step, job.total_steps, why)
            raise
        job.folder.write_last_status("done", job.state.step, job.total_steps)
    return 0


def _say_stopping(signal_name: str) -> None:
    say_at_once(f"memascend: {signal_name}: stopping at the next committed step; Ctrl-C again ends at once")


def _stopped(job: Run, error: StoppedError) -> MemascendError:
    text = f"{error}; {_how_to_go_on(job)}"
    # Only what can be resumed ends with the status that says so.
    return StoppedError(text) if has_store(job.config) or _saved_step(job) else RunError(text)


def _how_to_go_on(job: Run) -> str:
    if has_store(job.config):
        return "the same command goes on from there"
    step = _saved_step(job)
    if step is not None:
        return f"the same command goes on from the checkpoint of step {step}"
    lost = f"offload.placement={job.plan.placement} keeps nothing on disk, so it cannot be resumed"
    if job.kept is None:
        return lost
    return f"{lost}. The model as it is now is in {job.kept}: a new run can begin with it (model.source)"


def _saved_step(job: Run) -> int | None:
    """The step of the newest checkpoint of this run, from which it can go on without a store."""
    return job.checkpoints.newest if job.checkpoints is not None else None


def _load(config: Config, stack: ExitStack) -> Run:
    """Reads shapes, tokenizer and data, finds an earlier run, and plans; reads no weights and writes nothing."""
    screen = stack.enter_context(Screen())
    origin, folder = find_origin(config), RunFolder(config)
    stack.callback(folder.release)
    found = origin.found
    if saves_checkpoints(config):
        check_checkpoint_folder(config)
    if found is None:
        folder.check_writable()
        if not origin.own or folder.has_results:
            folder.check_is_free()
        if has_store(config):
            check_places(config)
    else:
        state = found.state
        started_in, finished = state.config["run"]["dir"], bool(state.results.get("finished"))
        folder.check_is_of(found.store_id, started_in, finished=finished)
    model = open_model(config)
    stack.callback(model.close)
    before = _state_before(origin)
    data = open_data(
        config,
        model,
        position=before.position if before is not None else None,
        read=sequences_read(before) if before is not None else 0,
        say=screen.say,
    )
    stack.callback(data.close)
    contents = content_digests(model.config, data)
    if found is None:
        if origin.saved is not None:
            check_origin(origin, config, model.config, model.adapters, contents)
        else:
            check_lora_source(config, model.config, model.adapters)
        plan = plan_config(config, model.config, n_examples=data.sequences)
        state = origin.state() if origin.saved is not None else RunState(0, {}, 0)
        state = replace(
            state,
            config=to_dict(config),
            tile_elements=plan.depths.tile_elements,
            contents=contents,
            sequences=sequences_read(state) if state.step else 0,
            run_id=(state.run_id if origin.own else "") or uuid4().hex,
        )
    else:
        found = check_contents(found, config, contents)
        origin = replace(origin, found=found)
        plan = plan_config(
            _with_durability(config, found.durability),
            model.config,
            n_examples=data.sequences,
            tile_elements=found.state.tile_elements,
        )
        # From the next commit on the settings of now are those to be compared with.
        read = sequences_read(found.state)
        state = replace(
            found.state,
            config=to_dict(config),
            contents=contents,
            sequences=read,
            run_id=found.state.run_id or uuid4().hex,
        )
    folder.run_id = state.run_id
    job = Run(config, folder, screen, model, data, plan, _total_steps(config, data, state), state, origin)
    if found is not None and state.step > job.total_steps:
        raise ConfigError(
            f"{found.where} holds a run at step {state.step}, past the {job.total_steps} that it is to have now; "
            "nothing was changed. Set train.steps (or train.epochs) to as many or more, or export the run as it is: "
            f"memascend export {' '.join(found.paths)} DIR"
        )
    if not job.is_complete:
        # What is wrong with the beginning of streamed data is found before anything is written.
        data.train.first_example()
        if before is not None and before.contents.get("train") == contents["train"]:
            data.train.check_position()
    if found is not None and not job.is_complete:
        check_tensors(found, plan.specs)
        check_scratch(found, plan.scratch_bytes)
    if found is None and state.step >= job.total_steps:
        raise ConfigError(
            f"the checkpoint is of step {state.step}, and the run ends at step {job.total_steps}: nothing would be "
            "trained. Set train.steps to more; for the model alone there is memascend export"
        )
    if not job.is_complete:
        space = checkpoint_space(config, plan.layout.format, plan.layout.tensors, plan.layout.frozen)
        if space is not None:
            check_checkpoint_space(space, plan.disk_bytes if found is None else 0)
    return job


def _state_before(origin: Origin) -> RunState | None:
    """The state that the run goes on with or begins with, or None."""
    if origin.found is not None:
        return origin.found.state
    return origin.state() if origin.saved is not None else None


def _with_durability(config: Config, durability: str) -> Config:
    """Returns ``config`` with the durability that a store has, whatever was asked for."""
    return config.model_copy(update={"offload": config.offload.model_copy(update={"durability": durability})})


def _check_weights(job: Run) -> None:
    """Looks for weights that the run's element type cannot hold, where there may be some."""
    layout = job.plan.layout
    if job.resumed or job.origin.saved is not None or not needs_look(job.model, layout.format.param_dtype):
        return
    with job.screen.progress("looking at the model", len(layout.tensors)) as advance:
        check_weight_range(job.model, layout.tensors, job.config.model.source, lambda name: advance(name))


def _check_store(job: Run) -> None:
    """Looks whether the store that the run goes on with is what was written; says what there is besides if not."""
    if not job.resumed:
        return
    try:
        check_whole(job.config)
    except DamagedStoreError as error:
        raise with_way_back(error, job.config) from error


def _begin(job: Run) -> None:
    """Writes the first files of the run and shows what is going to be done."""
    killed = job.folder.likely_oom_kill()
    if killed is not None:
        job.screen.say(killed)
    if job.state.results.get("finished"):
        # It is to be longer than the complete run that it goes on from, whose results stay beside its own.
        job.screen.say(
            f"the results of step {job.state.step} are kept: {job.folder.keep_results(job.state.step)}"
        )
        job.state = job.state.without_results("finished", "eval_loss_after", "answers_after")
    if saves_checkpoints(job.config):
        prove_writable(job.config)
    job.folder.prepare(job.config, job.plan.to_json(), job.state.step, job.total_steps)
    job.screen.show_plan(job.plan.rows())
    for note in job.model.notes:
        job.screen.say(note)
    job.screen.show_data(job.data, job.model.coder)


def _show_again(job: Run) -> None:
    """Shows the result of a complete run as it was shown at its end."""
    job.screen.say(f"the run in {job.folder.path} is complete at step {job.state.step}; nothing to do")
    # Its files may have been moved away: what makes a run complete is in the store.
    summary = read_summary(job.folder.path)
    if summary is not None:
        job.screen.show_summary(summary, _sample_rows(job))


def _total_steps(config: Config, data: Dataset, state: RunState) -> int:
    train = config.train
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None, "the configuration sets one of the two"
    step_sequences = train.micro_batch_size * train.gradient_accumulation_steps
    if data.train.per_epoch is None:
        raise ConfigError(_why_no_epochs(config, data))
    return steps_of_epochs(
        train.epochs, data.train.per_epoch, step_sequences, state.step, state.sequences or 0
    )


def _why_no_epochs(config: Config, data: Dataset) -> str:
    """Says that streamed data is not counted, and about how many steps an epoch has."""
    train = config.train
    about = data.estimated_sequences()
    steps = max(
        1, round(about * (train.epochs or 1) / (train.micro_batch_size * train.gradient_accumulation_steps))
    )
    return (
        f"train.epochs={train.epochs:g} needs the number of sequences, which nobody knows of streamed data before it "
        f"has been read: by its first part they are about {about:,}. Set train.steps={steps} (or data.stream=never, to "
        "read all of it into memory at the start)"
    )


def _set_up(
    job: Run, stack: ExitStack, wait_for_memory: Callable[[], None], stop: StopRequest
) -> tuple[Session, Trainer]:
    """Builds the parts, writes the first generation of a new run, and compiles."""
    limit_heap_growth(job.plan.depths.heap_bytes)
    cache = _keep_compiled_code(job.folder)
    if job.plan.compiles_apart:
        job.screen.say("compiling")
        train = job.config.train
        precompile_apart(
            job.plan.layout,
            (train.micro_batch_size, job.config.data.seq_len),
            train.gradient_accumulation_steps,
            cache,
            micro_norms=job.config.optimizer.log_noise_scale,
        )
    run = job.config.run
    if run.trace:
        stack.enter_context(recording(job.folder.trace(compressed=run.trace_gzip)))
    meter = stack.enter_context(Meter(MeterLog(job.folder.meter, meter_facts(job.plan)), run.meter_seconds))
    # The plan was made before the compiling, which takes long; the arena is all touched at once.
    wait_for_memory()
    arena = stack.enter_context(open_arena(job.plan))
    store = None
    if job.plan.placement == "ssd":
        store = stack.enter_context(open_store(job.config, job.plan, arena, resumed=job.resumed))
        job.screen.say(
            f"store: {store.io_backend}, {'direct' if store.direct else 'buffered'} I/O {store.io_reason}"
        )
        if not job.resumed:
            # Before the first commit: from then on the folder and the store must know each other.
            job.folder.store_id = store.store_id
            job.folder.write_status("starting", job.state.step, job.total_steps)
        note = durability_note(job.config, job.plan, store)
        if note is not None:
            job.screen.say(note)
    for note in job.origin.notes:
        job.screen.say(note)
    if job.found is not None:
        job.screen.say(f"going on from step {job.state.step} of {job.total_steps}")
        for note in notes(job.found, job.config, job.total_steps):
            job.screen.say(note)
    session = stack.enter_context(
        open_session(job.config, job.plan, arena, store, job.total_steps, job.state.scale_state())
    )
    job.screen.say(arena.describe())
    meter.use_gauges(build_gauges(session))
    stack.callback(meter.use_gauges, dict)
    metrics = stack.enter_context(MetricsFile(job.folder.metrics, job.state.metrics_bytes))
    if not job.resumed:
        with job.screen.progress("reading the model", len(job.plan.layout.tensors)) as advance:

            def on_tensor(name: str) -> None:
                stop.check("while the model was read, before the first step")
                advance(name)

            if job.origin.saved is not None:
                seed = job.config.train.seed
                restore_state(
                    job.plan.layout, session.placement, job.origin.saved, seed=seed, on_tensor=on_tensor
                )
            else:
                initialise_state(job.plan.layout, session.placement, job.model.pieces, on_tensor)
        _commit(job, session)
    job.checkpoints = stack.enter_context(
        open_checkpoints(
            job.config,
            job.plan.layout,
            session.placement,
            job.model.export_files,
            None if store is None else store.store_id,
            job.state.step,
            job.screen.say,
        )
    )
    trainer = Trainer(
        session.model,
        session.train_step,
        session.placement,
        session.clock,
        meter,
        metrics,
        planned_host_bytes=job.plan.memory.total_bytes,
        pinned_bytes=job.plan.arena_bytes,
        warn=lambda text: job.screen.say(f"warning: {text}"),
    )
    return session, trainer


def _hold_up_stages(job: Run, session: Session, watch: MemoryWatch, stop: StopRequest) -> None:
    """Holds up the computation while somebody else has the memory that the plan still needs; breaks off what can be."""

    def before_stage() -> None:
        if job.looking is not None:
            stop.check(job.looking)
        watch.keep_to_plan()
        if watch.is_short():
            with session.clock.span("memory_wait"):
                watch.wait(lambda: stop.requested)

    session.model.before_stage = before_stage


def _keep_compiled_code(folder: RunFolder) -> Path:
    """Keeps executables in the run's folder, unless the user has a place for them (JAX_COMPILATION_CACHE_DIR)."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    cache = {
        "jax_compilation_cache_dir": str(folder.compile_cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in cache.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
    return folder.compile_cache


def _commit(job: Run, session: Session, **results: Any) -> None:
    job.state = job.state.with_results(**results)
    session.placement.begin_commit(job.state.encode())
    session.placement.finish_commit()


def _train(job: Run, session: Session, trainer: Trainer, stop: StopRequest) -> None:
    """Evaluates, trains to the last step and evaluates again."""
    if job.state.step == 0 and "eval_loss_before" not in job.state.results:
        _commit(job, session, **_looked_at(job, session, "before"))
    trim_heap()
    train = job.config.train
    data = StepData(
        job.data.train,
        train.gradient_accumulation_steps,
        train.micro_batch_size,
        done_steps=job.state.step,
        read=job.state.sequences or 0,
    )
    job.folder.write_status("running", job.state.step, job.total_steps)
    if _evaluation_is_missing(job):
        job.state = _evaluated(job, session, trainer, job.state)
    if job.resumed and job.checkpoints is not None and job.checkpoints.was_missed(job.state.step):
        _save_due(job, trainer, job.state)
    try:
        with job.screen.training(job.total_steps, job.state.step) as on_line:
            job.state = trainer.train(
                job.state,
                data,
                job.total_steps,
                stop,
                on_line,
                lambda state: _after_step(job, session, trainer, state),
            )
    except StoppedError:
        _keep_model(job, session)
        raise
    trim_heap()
    if job.data.streams:
        job.screen.say(job.data.read_so_far())
    _commit(job, session, **_looked_at(job, session, "after"))
    if job.checkpoints is not None and job.checkpoints.is_due(job.state.step):
        job.checkpoints.save(job.state, job.state.results["eval_loss_after"])


def _looked_at(job: Run, session: Session, when: str) -> dict[str, Any]:
    """Returns the held-out loss and the answers ``before`` or ``after`` the training."""
    with job.only_looks(
        f"in the evaluation {when} the training, at step {job.state.step} of {job.total_steps}"
    ):
        return {f"eval_loss_{when}": _held_out_loss(job, session), f"answers_{when}": _answers(job, session)}


def _keep_model(job: Run, session: Session) -> None:
    """Saves what a stop would lose: as a checkpoint, or as a model beside the place of a finished run's export."""
    if has_store(job.config) or job.state.step == 0:
        return
    if job.checkpoints is not None:
        # From here the same command goes on.
        job.checkpoints.save(job.state, None)
    if _saved_step(job) == job.state.step or not job.config.run.export:
        return
    folder = job.folder.path / f"export_step_{job.state.step}"
    job.screen.say(f"nothing of this run is on disk: writing the model to {folder}")
    _export(job, session, folder)
    job.kept = folder


def _after_step(job: Run, session: Session, trainer: Trainer, state: RunState) -> RunState:
    job.state = state
    job.folder.write_status("running", state.step, job.total_steps)
    if state.step == 1:
        trim_heap()
    if _evaluation_is_missing(job):
        job.state = state = _evaluated(job, session, trainer, state)
    _save_due(job, trainer, state)
    return state


def _save_due(job: Run, trainer: Trainer, state: RunState) -> None:
    """Saves the checkpoint of a step that is one of those to be saved."""
    # The last step's waits for the evaluation after the training.
    if job.checkpoints is None or state.step >= job.total_steps or not job.checkpoints.is_due(state.step):
        return
    if job.config.checkpoint.keep_best and _evaluation_is_missing(job):
        # It was broken off. Whoever goes on evaluates first, and then saves the step with its loss.
        return
    losses = dict(state.results.get("eval_losses", []))
    with trainer.between_steps():
        job.checkpoints.save(state, losses.get(state.step))


def _evaluation_is_missing(job: Run) -> bool:
    """Whether the evaluation after the last step is due; it is not committed with the step, so a crash loses it."""
    every, step = job.config.train.eval_every, job.state.step
    due = bool(every) and 0 < step < job.total_steps and step % every == 0
    return due and step not in (known for known, _ in job.state.results.get("eval_losses", []))


def _evaluated(job: Run, session: Session, trainer: Trainer, state: RunState) -> RunState:
    with job.only_looks("in an evaluation"), trainer.between_steps():
        try:
            loss = _held_out_loss(job, session)
        except StoppedError:
            # The loop stops as after any step; whoever goes on evaluates first.
            return state
    job.screen.say(f"step {state.step}: held-out loss {loss:.4f}")
    losses = [*state.results.get("eval_losses", []), [state.step, loss]]
    return state.with_results(eval_losses=losses)


def _held_out_loss(job: Run, session: Session) -> float | None:
    if job.data.held_out is None:
        return None
    tokens = job.config.train.micro_batch_size * job.config.data.seq_len
    return evaluate(
        session.model,
        job.data.held_out,
        limit=job.config.data.eval_sequences,
        batch_size=job.config.train.micro_batch_size,
        group=max(1, _EVAL_GROUP_TOKENS // tokens),
    )


def _answers(job: Run, session: Session) -> list[str]:
    questions = job.data.questions[: job.config.train.samples]
    coder = job.model.coder
    if not questions or coder is None:
        return []
    prompts = [coder.encode_prompt(question.messages, question.tools).tolist() for question in questions]
    eos = job.model.config.eos_token_id
    ends = (*(eos if isinstance(eos, tuple) else (eos,)), coder.eos_id)
    stop_ids = {token for token in ends if token is not None}
    answers = generate_greedy(session.model, prompts, max_new_tokens=_SAMPLE_TOKENS, stop_ids=stop_ids)
    return [coder.tokenizer.decode(answer, skip_special_tokens=True).strip() for answer in answers]


def _save(job: Run, session: Session, stop: StopRequest) -> None:
    """Exports the model and writes the summary."""
    # A folder that is there was finished by this run before it was interrupted: it is renamed into place whole.
    if job.config.run.export and not job.folder.export.exists():
        with job.only_looks(f"in the export of step {job.state.step}"):
            _export(job, session, job.folder.export, stop)
    summary = summarise(
        job.state,
        job.plan,
        read_lines(job.folder.metrics),
        read_lines(job.folder.metrics, drain=True),
        take_sample().peak_rss_bytes,
    )
    job.folder.write_summary(summary)
    _commit(job, session, finished=True)
    _check_budget(job)
    job.screen.show_summary(summary, _sample_rows(job))


def _check_budget(job: Run) -> None:
    """Says so when the process took more memory than it was given."""
    peak, budget = take_sample().peak_rss_bytes, job.plan.memory.budget_bytes
    if peak > budget:
        job.screen.say(
            f"warning: the process took {format_bytes(peak)} of host memory, more than the {format_bytes(budget)} of "
            "its budget: the plan was too optimistic. Give it a larger offload.host_memory, or less where it must not "
            "take more"
        )


def _export(job: Run, session: Session, folder: Path, stop: StopRequest | None = None) -> None:
    layout, placement = job.plan.layout, session.placement

    def read(name: str, start: int, n_elements: int) -> NDArray[Any]:
        if stop is not None and job.looking is not None:
            stop.check(job.looking)
        if layout.adapters is not None:
            return read_masters(layout, placement, name, start, n_elements)
        return placement.read(name, start, n_elements)

    if layout.adapters is not None:
        base = base_name(job.config.model.source)
        files = job.model.export_files()
        export_adapter(read, "float32", job.model.config, layout.adapters, files, base, folder)
        return
    export_huggingface(
        read,
        layout.tensors,
        layout.format.param_dtype,
        job.model.config,
        job.model.export_files(),
        folder,
    )


def _sample_rows(job: Run) -> list[tuple[str, str, str, str]]:
    results = job.state.results
    return [
        (str(question.messages[-1]["content"]), question.answer, before, after)
        for question, before, after in zip(
            job.data.questions,
            results.get("answers_before", []),
            results.get("answers_after", []),
            strict=False,
        )
    ]
