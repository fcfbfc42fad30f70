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

_MOST_FIELDS = 20


def token_for(person: Principal, secret: bytes) -> str:
    """HMAC-SHA256 over who they are: another site can send a form in their name, but cannot read the token."""
    return hmac.new(secret, f"form\0{person.role}\0{person.name}".encode(), sha256).hexdigest()


def check_token(person: Principal, secret: bytes, token: str) -> None:
    """Forbidden unless the token is theirs; compared in constant time."""
    if not hmac.compare_digest(token_for(person, secret).encode(), token.encode()):
        raise Forbidden("the form is not from a page that is still valid. Go back, load the page again and repeat.")


def read_form(body: bytes) -> dict[str, str]:
    """The fields of a plain form; of a name that comes twice, the last."""
    try:
        return dict(parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError as error:  # not UTF-8, or too many fields
        raise InputError(f"the form cannot be read: {error}", way_out="Load the page again and repeat.") from error


HEAVIEST = 1e6
MOST_DEVICES = 1_000_000


@dataclass(frozen=True, slots=True)
class Field:
    """Something to fill in; a field without bounds takes text, which may be one of its suggestions."""

    name: str
    label: str
    value: float | int | str
    least: float | None = None
    most: float | None = None
    step: str = "1"
    suggestions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Action:
    """Something that may be wished, and what its button says."""

    verb: str
    label: str
    question: str
    button: str
    fields: tuple[Field, ...] = ()
    is_final: bool = False


def job_actions(job: JobView, who: Principal) -> tuple[Action, ...]:
    """What somebody may wish of a job as it stands."""
    if job.phase.is_over or not who.may_change(job.user):
        return ()
    question = "Let it count more or less against other jobs from now on."
    weight = Field("weight", "Weight", job.weight, 0.001, HEAVIEST, "any")
    weigh = Action("weigh", "Weight", question, "Set weight", (weight,))
    question = "Let it hold so many devices from now on. One that runs is resized without a restart."
    least = Field("min_devices", "At least", job.min_devices, 1, MOST_DEVICES)
    most = Field("max_devices", "At most", job.max_devices, 1, MOST_DEVICES)
    limit = Action("limit", "Devices", question, "Set devices", (least, most))
    question = "Take it off its devices? It keeps its progress and waits until you resume it."
    pause = Action("pause", "Pause", question, f"Pause {job.id}")
    resume = Action("resume", "Resume", "Put it back into the queue?", f"Resume {job.id}")
    question = "Withdraw this job? It cannot be resumed; what it has written stays."
    cancel = Action("cancel", "Cancel", question, f"Cancel {job.id}", is_final=True)
    turn = {Phase.PAUSED: (resume,), Phase.BLOCKED: ()}.get(job.phase, (pause,))
    return (weigh, limit, *turn, cancel)


def policy_action(policy: str, who: Principal) -> tuple[Action, ...]:
    """A change of the policy, for those who may."""
    if who.role is not Role.ADMIN:
        return ()
    question = "Let another policy decide from now on? Jobs keep their progress; many may move."
    name = Field("policy", "Policy, NAME:key=value…", policy, suggestions=tuple(sorted(POLICIES)))
    return (Action("policy", "Change", question, "Change policy", (name,)),)


async def execute_action(clerk: SchedulerService, who: Principal, verb: str, form: Mapping[str, str]) -> str:
    """Do what a form asks for; the page to show then."""
    job = form.get("job", "")
    match verb:
        case "cancel":
            await clerk.cancel(who, job)
        case "pause":
            await clerk.pause(who, job)
        case "resume":
            await clerk.resume(who, job)
        case "weigh":
            await clerk.set_weight(who, job, read_weight(form.get("weight", "")))
        case "limit":
            least, most = (read_devices(form.get(name, "")) for name in ("min_devices", "max_devices"))
            await clerk.set_limits(who, job, least, most)
        case "policy":
            await clerk.change_policy(who, read_policy(form.get("policy", "")))
            return "/decisions"
        case _:
            raise NotFound(f"nothing can be wished by the name of {verb!r}")
    return job_address(job)


def job_address(job: str) -> str:
    """Where a job's page is."""
    return f"/jobs/{quote(job, safe='')}"


def read_weight(text: str) -> float:
    """What a job should count."""
    try:
        weight = float(text)
    except ValueError:
        weight = inf
    if not 0.0 < weight <= HEAVIEST:
        raise InputError(f"the weight is {text!r}", way_out=f"Give a number above 0, at most {HEAVIEST:,.0f}.")
    return weight


def read_devices(text: str) -> int:
    """A number of devices."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= number <= MOST_DEVICES:
        raise InputError(f"the number of devices is {text!r}", way_out="Give a whole number of at least 1.")
    return number


def read_policy(text: str) -> str:
    """A policy by name; files are left to the command line, where it is clear whose they are."""
    text = text.strip()
    if text.partition(":")[0].endswith(".py"):
        raise InputError(f"the policy is {text!r}, a file", way_out="Name it on the command line: carpool policy FILE.")
    return text
