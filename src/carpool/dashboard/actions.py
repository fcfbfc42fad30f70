"""Form actions: fields, confirmation, CSRF token, and the service call behind each action."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from urllib.parse import parse_qsl, quote

from carpool.core.errors import InputError
from carpool.core.model import Phase
from carpool.policies.registry import POLICIES
from carpool.service.auth import Forbidden, Principal, Role
from carpool.service.queries.views import JobView
from carpool.service.service import NotFound, SchedulerService

_MAX_FIELDS = 20


def token_for(principal: Principal, secret: bytes) -> str:
    """HMAC-SHA256 of a principal: another site can submit a form in their name, but cannot read this token."""
    return hmac.new(secret, f"form\0{principal.role}\0{principal.name}".encode(), sha256).hexdigest()


def check_token(principal: Principal, secret: bytes, token: str) -> None:
    """Raise Forbidden unless the token belongs to the principal; compares in constant time."""
    if not hmac.compare_digest(token_for(principal, secret).encode(), token.encode()):
        raise Forbidden("the form has expired. Reload the page and try again.")


def read_form(body: bytes) -> dict[str, str]:
    """Decode a URL-encoded form; the last value of a repeated field counts."""
    try:
        return dict(parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=_MAX_FIELDS))
    except ValueError as error:  # not UTF-8, or too many fields
        raise InputError(f"cannot decode the form: {error}", way_out="Reload the page and try again.") from error


MAX_WEIGHT = 1e6
MAX_DEVICES = 1_000_000


@dataclass(frozen=True, slots=True)
class Field:
    """Input of a form: a number if it has bounds, else text with suggestions."""

    name: str
    label: str
    value: float | int | str
    minimum: float | None = None
    maximum: float | None = None
    step: str = "1"
    suggestions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Action:
    """Action a user may take, and the texts of its form."""

    verb: str
    label: str
    question: str
    button: str
    fields: tuple[Field, ...] = ()
    is_final: bool = False


def job_actions(job: JobView, principal: Principal) -> tuple[Action, ...]:
    """Actions a principal may take on a job in its current phase."""
    if job.phase.is_over or not principal.may_change(job.user):
        return ()
    question = "Policies count a job of weight 2 twice as much as a job of weight 1."
    weight = Field("weight", "Weight", job.weight, 0.001, MAX_WEIGHT, "any")
    weigh = Action("weight", "Weight", question, "Set weight", (weight,))
    question = "How many devices the job may use. A running job is resized without a restart."
    min_devices = Field("min_devices", "At least", job.min_devices, 1, MAX_DEVICES)
    max_devices = Field("max_devices", "At most", job.max_devices, 1, MAX_DEVICES)
    limit = Action("limit", "Devices", question, "Set devices", (min_devices, max_devices))
    question = "Preempt this job? It releases its devices, keeps its progress and waits until you resume it."
    pause = Action("pause", "Pause", question, f"Pause {job.id}")
    resume = Action("resume", "Resume", "Put this job back into the queue?", f"Resume {job.id}")
    question = "Cancel this job? It cannot be resumed; checkpoints, metrics and log are kept."
    cancel = Action("cancel", "Cancel", question, f"Cancel {job.id}", is_final=True)
    toggle = {Phase.PAUSED: (resume,), Phase.BLOCKED: ()}.get(job.phase, (pause,))
    return (weigh, limit, *toggle, cancel)


def policy_action(policy: str, principal: Principal) -> tuple[Action, ...]:
    """The change of policy, for admins only."""
    if principal.role is not Role.ADMIN:
        return ()
    question = "Change the scheduling policy? Jobs keep their progress, but many may be moved."
    name = Field("policy", "Policy, NAME:key=value…", policy, suggestions=tuple(sorted(POLICIES)))
    return (Action("policy", "Change", question, "Change policy", (name,)),)


async def execute_action(service: SchedulerService, principal: Principal, verb: str, form: Mapping[str, str]) -> str:
    """Execute the action of a form; returns the page to show next."""
    job = form.get("job", "")
    match verb:
        case "cancel":
            await service.cancel(principal, job)
        case "pause":
            await service.pause(principal, job)
        case "resume":
            await service.resume(principal, job)
        case "weight":
            await service.set_weight(principal, job, read_weight(form.get("weight", "")))
        case "limit":
            bounds = (read_devices(form.get(name, "")) for name in ("min_devices", "max_devices"))
            await service.set_limits(principal, job, *bounds)
        case "policy":
            await service.change_policy(principal, read_policy(form.get("policy", "")))
            return "/decisions"
        case _:
            raise NotFound(f"unknown action {verb!r}")
    return job_path(job)


def job_path(job: str) -> str:
    """Path of a job's page."""
    return f"/jobs/{quote(job, safe='')}"


def read_weight(text: str) -> float:
    """Parse a weight; InputError outside (0, MAX_WEIGHT]."""
    try:
        weight = float(text)
    except ValueError:
        weight = inf
    if not 0.0 < weight <= MAX_WEIGHT:
        raise InputError(f"weight is {text!r}", way_out=f"Give a number above 0 and at most {MAX_WEIGHT:,.0f}.")
    return weight


def read_devices(text: str) -> int:
    """Parse a number of devices; InputError unless it is a whole number from 1 to MAX_DEVICES."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= number <= MAX_DEVICES:
        raise InputError(f"number of devices is {text!r}", way_out="Give a whole number of at least 1.")
    return number


def read_policy(text: str) -> str:
    """Parse a policy's name; policy files are accepted on the command line only."""
    text = text.strip()
    if text.partition(":")[0].endswith(".py"):
        raise InputError(f"policy {text!r} is a file", way_out="Set it on the command line: carpool policy FILE.")
    return text
