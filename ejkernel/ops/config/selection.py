"""Which config a call gets: explicit, overlays, memory, disk, tuning, nearest shape, guess."""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from ejkernel import _compat
from ejkernel.errors import EjkernelError
from ejkernel.ops.config.asking import accepts, heuristic, is_candidate, leaves_no_choice, source_line, source_of
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.kinds import ConfigClassWarning, check_explicit, is_renamed, misfit, note_owner
from ejkernel.ops.config.policy import AutotunePolicy as AutotunePolicy
from ejkernel.ops.config.policy import effective_policy
from ejkernel.ops.config.policy import policy_override as policy_override
from ejkernel.ops.core import context
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.utils import arguments, classes
from ejkernel.ops.utils.canonical import same_cfg
from ejkernel.ops.utils.fingerprint import current_device, is_here, qualified_name, require_here
from ejkernel.ops.utils.services import services

if TYPE_CHECKING:
    from ejkernel.ops.store.entry import StoredEntry
    from ejkernel.ops.store.persistent import PersistentCache

logger = logging.getLogger(__name__)


class SymbolicCallWarning(UserWarning):
    """A call could not be tuned because its dimensions are not known."""


class ConfigNotFoundError(EjkernelError, LookupError):
    """The policy is `frozen` and nothing is stored for a call."""


@runtime_checkable
class Tuner(Protocol):
    """What a selector needs of a tuner."""

    def autotune(
        self, make_fn: Callable[[Any], Callable[..., Any]], args: Any, kwargs: Any, candidates: Iterable[Any]
    ) -> Any:
        """The best of `candidates`; `make_fn(cfg)` is a function of `(*args, **kwargs)`."""
        ...


class Tier(NamedTuple):
    """What one tier holds for a call."""

    name: str
    cfg: Any = None
    note: str = ""


class Selection(NamedTuple):
    """The chosen config, the tier that gave it, and what each tier held."""

    inv: Invocation[Any, Any]
    cfg: Any
    tier: str
    tiers: tuple[Tier, ...]
    policy: AutotunePolicy

    @property
    def depth(self) -> int:
        """How many tiers had no config before one did."""
        return len(self.tiers) - (self.tiers[0].name == "explicit" if self.tiers else 0)

    def __str__(self) -> str:
        device, op_id, call_key = self.inv.key
        rows = [
            f"{op_id} on {device}, call {call_key}: {self.cfg!r} from {self.tier} (autotune {self.policy.autotune})"
        ]
        for tier in self.tiers:
            held = "-" if tier.cfg is None else repr(tier.cfg)
            mark = "*" if tier.name == self.tier else " "
            rows.append(f" {mark} {tier.name:<12} {held}{f'  ({tier.note})' if tier.note else ''}")
        return "\n".join(rows)


OnEvent = Callable[..., None]


def _check(name: str, value: Any, wanted: str, fits: bool) -> None:
    if value is not None and not fits:
        raise EjkernelError(f"ConfigSelectorChain: {name} must be {wanted} or None, got {value!r}.")


class _Flights:
    """One lock per key, so that threads that miss the same call measure it once."""

    def __init__(self) -> None:
        # Weak: a lock that nobody holds or waits for may go.
        self._locks: weakref.WeakValueDictionary[Any, threading.RLock] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def of(self, key: Any) -> threading.RLock:
        with self._lock:
            return self._locks.setdefault(key, threading.RLock())


class ConfigSelectorChain:
    """Looks for a config in several tiers: explicit, overlays, memory, disk, tuning, nearest shape, guess.

    Reads shapes and dtypes only, so it is safe while tracing. Only measured results are ever stored.
    """

    def __init__(
        self,
        cache: ConfigCache[Any] | None = None,
        persistent: PersistentCache | None = None,
        autotune: bool | str | None = None,
        *,
        policy: AutotunePolicy | None = None,
        tuner: Tuner | None = None,
        persist_autotune: bool = True,
        on_event: OnEvent | None = None,
    ) -> None:
        if policy is not None and autotune is not None:
            raise EjkernelError("ConfigSelectorChain: give autotune= or policy=, not both.")
        _check("policy", policy, "an AutotunePolicy", isinstance(policy, AutotunePolicy))
        _check("cache", cache, "a ConfigCache", hasattr(cache, "get") and hasattr(cache, "put"))
        _check("persistent", persistent, "a PersistentCache", hasattr(persistent, "lookup"))
        _check("tuner", tuner, "a Tuner", hasattr(tuner, "autotune"))
        _check("on_event", on_event, "a function", callable(on_event))
        self.cache = cache if cache is not None else ConfigCache()
        self.persistent = persistent
        self.tuner = tuner
        self.persist_autotune = persist_autotune
        self.on_event = on_event
        if policy is None:
            # `EJKERNEL_AUTOTUNE=frozen` in CI counts for every selector, unless it has an explicit setting.
            policy = AutotunePolicy.from_environment() if autotune is None else AutotunePolicy(autotune=autotune)  # pyright: ignore[reportArgumentType]
        self._policy = policy
        self._flights = _Flights()
        self._told: set[tuple[str, str]] = set()

    @property
    def policy(self) -> AutotunePolicy:
        """The policy outside any `policy_override`; setting it reaches functions that were jitted before."""
        return self._policy

    @policy.setter
    def policy(self, policy: AutotunePolicy) -> None:
        if policy != self._policy:
            self._policy = policy
            if context.was_asked(self):
                context.invalidate()

    def choose(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
        """The config to run `inv` with."""
        note_owner(kernel)
        tiers = list(self._served())
        for _, served in tiers:
            served.ask(inv.key)
        try:
            selection = self.select(inv, kernel)
        except ConfigNotFoundError:
            for _, served in tiers:
                # A trace may have continued without a config: once there is one, it must look again.
                served.note(inv.key, None)
            raise
        except BaseException:
            for _, served in tiers:
                served.forget(inv.key)
            raise
        guessed = selection.tier in ("heuristic", "transferred") and selection.policy.transfer
        store = None if self.persistent is None else self.persistent.served
        for depth, served in tiers:
            if depth <= selection.depth:
                # Only stored configs of other calls may later be used for this one.
                served.note(inv.key, selection.cfg, guessed=guessed and served is store)
            else:
                served.forget(inv.key)
        self._emit("select", inv, tier=selection.tier, cfg=selection.cfg)
        return selection.cfg

    def _served(self) -> Iterator[tuple[int, context.Served]]:
        """The `Served` of each tier that can change, with its depth in the order of `_stored`."""
        overlays = context.current_scope().overlays
        sources = [overlay.source for overlay in reversed(overlays)]
        for depth, source in enumerate([*sources, self.cache, self.persistent], start=1):
            if (served := getattr(source, "served", None)) is not None:
                yield depth, served

    def select(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Selection:
        """The first tier's answer, and what the tiers before it held; tunes if the policy says so."""
        policy = effective_policy(self)
        if policy.autotune == "frozen" and self.persistent is not None:
            self.persistent.require_packs()
        joint = self._joint(policy)
        tiers: list[Tier] = []
        for tier in self._local(inv, kernel) if joint is not None else self._all_stored(inv, kernel, policy):
            tiers.append(tier)
            if tier.cfg is not None:
                return Selection(inv, tier.cfg, tier.name, tuple(tiers), policy)
        if joint is None:
            answer = self.on_miss(inv, kernel, policy)
        else:
            agreed = joint.choose(inv, kernel, policy)
            tiers += [Tier("memory"), Tier("persistent")]
            answer = Tier(agreed.tier, agreed.cfg, agreed.note)
        return Selection(inv, answer.cfg, answer.name, (*tiers, answer), policy)

    def _agreed(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], policy: AutotunePolicy) -> Iterator[Tier]:
        """The config that was already agreed on with other processes, if there are any."""
        joint = self._joint(policy)
        if joint is not None and (known := joint.known(inv, kernel, policy)) is not None:
            yield Tier("agreed", known.cfg, f"{known.tier}, {known.note}")

    def _joint(self, policy: AutotunePolicy) -> Any:
        """The joint selection of all processes; None if there is only one, or the policy does not want agreement."""
        return services.joint(self) if policy.agree else None

    def effective_policy(self) -> AutotunePolicy:
        """The policy with all overrides that are active here."""
        return effective_policy(self)

    def explain(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Selection:
        """Like `select`, but reads every tier and never tunes or raises on a miss."""
        policy = effective_policy(self)
        stored = self.stored(inv, kernel, policy, now=False)
        tiers = [*self._local(inv, kernel), *self._agreed(inv, kernel, policy), *stored]
        if policy.autotune == "on" and not inv.is_symbolic:
            tiers.append(Tier("autotune", None, "would measure the candidates now"))
        elif policy.autotune != "frozen" and not inv.is_symbolic:
            tiers.append(self._transferred(inv, kernel, policy, now=False))
        guess = Tier("heuristic", heuristic(inv, kernel))
        if policy.autotune == "frozen" and all(tier.cfg is None for tier in tiers):
            guess = Tier("frozen", None, f"raises; the guess would be {guess.cfg!r}")
        tiers.append(guess)
        found = next((tier for tier in tiers if tier.cfg is not None), tiers[-1])
        return Selection(inv, found.cfg, found.name, tuple(tiers), policy)

    def needs_inputs(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> bool:
        """Whether choosing would measure, and so needs the call's own data."""
        policy = effective_policy(self)
        if policy.autotune != "on" or inv.is_symbolic:
            return False
        if any(t.cfg is not None for t in self._all_stored(inv, kernel, policy)):
            return False
        joint = self._joint(policy)
        return joint is None or joint.known(inv, kernel, policy) is None

    def _all_stored(
        self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], policy: AutotunePolicy
    ) -> Iterator[Tier]:
        """The tiers that hold configs, in order; lazily, because one may read a disk."""
        yield from self._local(inv, kernel)
        yield from self.stored(inv, kernel, policy)

    def _local(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Iterator[Tier]:
        """The tiers that belong to the program, which is the same in all processes."""
        if inv.override_cfg is not None:
            check_explicit(inv, kernel, inv.override_cfg)
            yield Tier("explicit", inv.override_cfg)
        overlays = context.current_scope().overlays
        for depth, overlay in enumerate(reversed(overlays)):
            tier = Tier("overlay", overlay.source.get(*inv.key), f"depth {len(overlays) - depth}")
            yield self._fitting(tier, inv, kernel)

    def stored(
        self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], policy: AutotunePolicy, *, now: bool = True
    ) -> Iterator[Tier]:
        """The tiers that belong to this process; without `now`, nothing is run to check a config."""
        yield self._memory_tier(inv, kernel)
        if self.persistent is not None:
            yield self._persistent_tier(self.persistent, inv, kernel, policy, now=now)

    def _memory_tier(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Tier:
        return self._fitting(Tier("memory", self.cache.get(*inv.key)), inv, kernel)

    def _fitting(self, tier: Tier, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], stored_as: str = "") -> Tier:
        """The tier, or an empty one if its config is of another class than the kernel's."""
        if tier.cfg is None:
            return tier
        cls, wanted = type(tier.cfg), kernel.cfg_type
        if classes.is_redefined(cls, wanted):
            return Tier(tier.name, None, f"{wanted.__qualname__} was defined again since")
        wanted = misfit(inv, kernel, tier.cfg)
        if wanted is None and stored_as and not is_renamed(stored_as, cls):
            wanted = qualified_name(cls)
        if wanted is None:
            return tier
        found = stored_as.replace(":", ".") or qualified_name(cls)
        if (found, inv.op_id) not in self._told:
            self._told.add((found, inv.op_id))
            text = (
                f"{inv.op_id}: what {tier.name} holds for call {inv.call_key} is a {found}, and "
                f"{qualified_name(type(source_of(kernel)))} takes a {wanted}. It counts as absent. If two kernels "
                "share this op id, give one of them another name."
            )
            warnings.warn(text, ConfigClassWarning, stacklevel=2)
        return Tier(tier.name, None, f"a {found}, not a {wanted}")

    def _persistent_tier(
        self,
        store: PersistentCache,
        inv: Invocation[Any, Any],
        kernel: Kernel[Any, Any],
        policy: AutotunePolicy,
        *,
        now: bool = True,
    ) -> Tier:
        entry = store.lookup(*inv.key, cfg_type=kernel.cfg_type, kernel=source_of(kernel), stale=policy.stale)
        if entry is None:
            return Tier("persistent")
        if entry.stale and policy.stale == "retune" and policy.autotune == "on":
            return Tier("persistent", None, f"stale: {entry.stale}")
        if entry.has_other_source and not is_candidate(inv, kernel, entry.cfg):
            return Tier("persistent", None, f"{entry.cfg!r} is no candidate any more: {entry.stale}")
        tier = Tier("persistent", entry.cfg, f"{entry.layer}{f', stale: {entry.stale}' if entry.stale else ''}")
        if entry.clock is not None:
            tier = self._ranked(tier, entry, inv, kernel, policy, now=now)
        return self._fitting(tier, inv, kernel, entry.cfg_data["type"])

    def _ranked(
        self,
        tier: Tier,
        entry: StoredEntry,
        inv: Invocation[Any, Any],
        kernel: Kernel[Any, Any],
        policy: AutotunePolicy,
        *,
        now: bool,
    ) -> Tier:
        """The tier of a config that a compiler has ranked: it never ran, so it is checked where it can be."""
        note = f"{tier.note}, clock: {entry.clock}, not measured"
        if not is_here():
            return tier._replace(note=note)
        if policy.autotune == "on":
            return Tier(tier.name, None, f"{note}: would be measured now")
        if kernel.collective and _compat.distributed_client() is not None:
            return Tier(tier.name, None, f"{note}; one process alone cannot check a collective kernel")
        with self._flights.of(("proof", *inv.key)) if now else nullcontext():
            found = services.prove(inv, kernel, entry.cfg, self.persistent, now=now)
        if found is None:
            return tier._replace(note=f"{note}; to be checked at the first call")
        if found.reason is not None:
            return Tier(tier.name, None, f"{note}, but {found.reason}")
        return tier._replace(note=note)

    def _transferred(
        self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], policy: AutotunePolicy, *, now: bool = True
    ) -> Tier:
        """The config of the nearest tuned shape, if the kernel accepts it for this one and it computes the same.

        If tuning the nearest shape did not beat the guess, this call gets its own guess, which was made for its shape.
        Without `now`, a config that was not checked yet is returned without the check.
        """
        fits = lambda entry: kernel.transfers(inv, entry.cfg) and accepts(inv, kernel, entry.cfg)
        usable = lambda entry: entry.complete if entry.kept_guess else fits(entry)
        entry = self._nearest(inv, kernel, policy, usable) if policy.transfer else None
        if entry is None:
            return Tier("transferred")
        from ejkernel.ops.store.signatures import compare_signatures

        changes = "; ".join(compare_signatures(entry.signature or {}, inv.signature))
        if entry.kept_guess:
            return Tier("transferred", None, f"the guess was not beaten for {changes}")
        if kernel.collective and _compat.distributed_client() is not None:
            return Tier("transferred", None, f"tuned for {changes}; one process alone cannot check a collective kernel")
        with self._flights.of(("proof", *inv.key)) if now else nullcontext():
            found = services.prove(inv, kernel, entry.cfg, self.persistent, now=now)
        if found is None:
            return Tier("transferred", entry.cfg, f"tuned for {changes}; to be checked at the first call")
        if found.reason is not None:
            return Tier("transferred", None, f"tuned for {changes}, but {found.reason}")
        return Tier("transferred", entry.cfg, f"tuned for {changes}")

    def _nearest(
        self,
        inv: Invocation[Any, Any],
        kernel: Kernel[Any, Any],
        policy: AutotunePolicy,
        accept: Callable[[StoredEntry], bool],
    ) -> StoredEntry | None:
        if self.persistent is None:
            return None
        from ejkernel.ops.config.transfer import nearest

        return nearest(
            self.persistent,
            *inv.key[:2],
            inv.signature,
            cfg_type=kernel.cfg_type,
            accept=accept,
            kernel=source_of(kernel),
            stale=policy.stale,
        )

    def on_miss(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], policy: AutotunePolicy) -> Tier:
        """What to do without a stored config: measure, use the nearest shape's config or the guess, or raise."""
        if policy.autotune in ("on", "frozen") and leaves_no_choice(inv, kernel):
            return Tier("heuristic", heuristic(inv, kernel), "there is nothing to choose")
        if inv.is_symbolic and policy.autotune != "frozen":
            if policy.autotune == "on":
                self._warn_of_symbols(inv)
            return Tier("heuristic", heuristic(inv, kernel))
        if policy.autotune == "on":
            try:
                return Tier("autotune", self._tune(inv, kernel, policy))
            except NotImplementedError as refusal:  # From inside the backend: the call goes on to the next one.
                return Tier("heuristic", heuristic(inv, kernel), str(refusal))
        if policy.autotune == "frozen":
            raise ConfigNotFoundError(self._miss(inv, kernel))
        if policy.autotune == "record":
            from ejkernel.ops import registry

            registry.record_invocation(kernel, inv)
            self._emit("miss", inv)
        transferred = self._transferred(inv, kernel, policy)
        return transferred if transferred.cfg is not None else Tier("heuristic", heuristic(inv, kernel))

    def _warn_of_symbols(self, inv: Invocation[Any, Any]) -> None:
        """Warns once per operation that the policy cannot be followed."""
        if ("symbolic", inv.op_id) not in self._told:
            self._told.add(("symbolic", inv.op_id))
            shapes = ", ".join(str(x.shape) for x in arguments.split((inv.abstract_args, inv.abstract_kwargs))[0])
            warnings.warn(
                f"{inv.op_id}: a call with symbolic dimensions ({shapes}) cannot be tuned and runs with the kernel's "
                "guess. Pass cfg=, or put a config for all sizes into a cache.",
                SymbolicCallWarning,
                stacklevel=2,
            )

    def _miss(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> str:
        """The message about a miss: the call, how to tune it, and the closest call that is stored."""
        from ejkernel.ops.config.command import shown, tune_command
        from ejkernel.ops.store.signatures import closest

        lines = [
            f"{inv.op_id}: no config is stored for call {inv.call_key} on {inv.device_fingerprint}, and the policy is "
            '"frozen". Tune it first, or set EJKERNEL_AUTOTUNE to "off".',
            f"The call: {shown(inv)}",
            f"To tune it: {tune_command(inv, kernel)}",
        ]
        if inv.is_symbolic:
            lines.append("A call with symbolic dimensions cannot be tuned: pass cfg=, or put a config into a cache.")
        stored = () if self.persistent is None else self.persistent.entries(*inv.key[:2])
        if (found := closest(stored, inv.signature)) is not None:
            entry, fields = found
            lines += [f"The closest stored call is {entry.place.call_key}:", *(f"  {field}" for field in fields)]
        return "\n".join(lines)

    def _tune(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], policy: AutotunePolicy) -> Any:
        """Measures, unless another thread or process has done so in the meantime."""
        with self._alone(inv.key):
            for tier in self._all_stored(inv, kernel, policy):
                if tier.cfg is not None:
                    return tier.cfg
            tuning = self.measured(inv, kernel, services.make_tuner(self.tuner))
            if (text := tuning.shortfall(source_line(inv, kernel))) is not None:
                # To the log: the code that makes this call may not be the code that turned tuning on.
                logger.warning("%s: %s", inv.op_id, text)
            return tuning.cfg

    @contextmanager
    def _alone(self, key: tuple[str, str, str]) -> Iterator[None]:
        """Lets only one of all threads, and of all processes that share the store, measure a call."""
        store = self.persistent
        with self._flights.of(key), store.tuning_lock(key) if store is not None else nullcontext():
            yield

    def tune(
        self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], *, tuner: Any = None, configs: Any = None
    ) -> Any:
        """Measures the candidates of a call now, stores the winner, and returns the whole outcome.

        If `configs` are given, the winner is not stored: the kernel may not list it.
        """
        note_owner(kernel)
        joint = self._joint(effective_policy(self))
        if joint is not None:
            return joint.tune(inv, kernel, tuner, configs)
        made = services.make_tuner(tuner if tuner is not None else self.tuner)
        if configs is not None:
            return made.tune(inv, kernel, configs=configs)
        with self._alone(inv.key):
            return self.measured(inv, kernel, made)

    def measured(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], tuner: Any, *, persist: bool = True) -> Any:
        """Measures and stores in memory; on disk too, unless another process does that."""
        fits = lambda entry: accepts(inv, kernel, entry.cfg)
        require_here(f"tuning {inv.op_id}")  # Here too: a tuner need not be ours.
        near = self._nearest(inv, kernel, effective_policy(self), fits)
        store = self.persistent if self.persist_autotune and persist else None
        seeds = () if near is None else (near.cfg,)
        tuning = tuner.tune(inv, kernel, store=store, seeds=seeds)
        # A tuning that was stopped before it measured anything has only the guess, which is never stored.
        if tuning.measurement is not None:
            stays = None if tuning.complete else self._finished(inv, kernel)
            if stays is not None and same_cfg(stays, tuning.cfg):
                return tuning
            if stays is not None and not tuning.has_beaten(stays):
                logger.info("%s: stopped early; what a finished tuning has stored stays: %r", inv.op_id, stays)
                return replace(tuning, cfg=stays, measurement=None, speedup=None)
            new = bool(tuning.candidates)
            facts = {"statistics": tuning.statistics(), "complete": tuning.complete}
            measured = {"timer": tuning.timer, "device": current_device().device_kind}
            self._remember(inv, kernel, tuning.cfg, persist=new and persist, provenance=measured, **facts)
        return tuning

    def _finished(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
        """The config that a finished tuning has stored for a call, if it may be used; else None."""
        store, policy = self.persistent, effective_policy(self)
        if store is None:
            return None
        entry = store.lookup(*inv.key, cfg_type=kernel.cfg_type, kernel=source_of(kernel), stale=policy.stale)
        if entry is None or not entry.complete or entry.clock is not None:
            return None
        return self._persistent_tier(store, inv, kernel, policy).cfg

    def shared_tuner(
        self,
        tuner: Any,
        kernel: Kernel[Any, Any],
        policy: AutotunePolicy,
        agreement: Any,
        place: str,
        claim: Any,
    ) -> Any:
        """The tuner of this process if all processes measure."""
        made = services.make_tuner(tuner if tuner is not None else self.tuner)
        return services.share_tuner(made, kernel, policy, agreement, place, claim)

    def adopt(self, inv: Invocation[Any, Any], cfg: Any) -> None:
        """Stores a config that was measured for all processes in memory."""
        self._answered(inv)
        self.cache.put(*inv.key, cfg)

    def _answered(self, inv: Invocation[Any, Any]) -> None:
        for store in (self.cache, self.persistent):
            if store is not None:
                # The call that asked gets this answer, so no other function has to be traced again.
                store.served.forget(inv.key)

    def _remember(
        self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any, *, persist: bool = True, **facts: Any
    ) -> None:
        self.adopt(inv, cfg)
        if persist and self.persistent is not None and self.persist_autotune:
            from ejkernel.ops.store.layers import StoreWarning
            from ejkernel.ops.utils.tagged import ConfigEncodeError

            try:
                self.persistent.put(*inv.key, cfg, signature=inv.signature, kernel=source_of(kernel), **facts)
            except ConfigEncodeError as error:
                warnings.warn(f"{inv.op_id}: the tuned config stays in memory: {error}", StoreWarning, stacklevel=2)
        self._emit("tuned", inv, cfg=cfg, **facts)

    def _emit(self, name: str, inv: Invocation[Any, Any], **data: Any) -> None:
        device, op_id, call_key = inv.key
        logger.debug("%s %s %s on %s: %s", name, op_id, call_key, device, data)
        if self.on_event is not None:
            self.on_event(name, device=device, op_id=op_id, call_key=call_key, **data)
