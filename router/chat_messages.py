"""Chat messages of a request: roles and text, as the chat template reads them; anything else is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MESSAGE_NOTES = frozenset({"name"})  # no template at hand reads it


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Messages as the chat template reads them: role and text. What is not text is refused by name."""
    if not messages:
        raise InvalidRequest("messages is empty; give at least one", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, str]:
    for key, value in message.items():
        if key not in ("role", "content") and key not in _MESSAGE_NOTES and value not in (None, [], ""):
            raise InvalidRequest(f"{where}.{key} is not supported; remove it", param=f"{where}.{key}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role is {role!r}; expected one of {', '.join(_ROLES)}", param=f"{where}.role"
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidRequest(
            f"{where}.content is {json_type(content)}; expected text", param=f"{where}.content"
        )
    return {"role": _ROLES[role], "content": content}


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else json_type(part)
        raise InvalidRequest(f"{where} is of type {kind!r}; only text parts are supported", param=where)
    return str(part["text"])


def json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return names.get(type(value), "an object")
