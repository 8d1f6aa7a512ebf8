"""A record of a data set -> the messages of a chat, in the form that templates read.

Forms: `messages` (role and content, as in OpenAI, TRL, MaxText), `conversations` (from and value,
ShareGPT's), `prompt` and `completion`, and `instruction`, `input` and `output` (Alpaca's). A pair
of chats is `chosen` and `rejected`.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from maxramp.data.files.records import BadRecord, describe
from maxramp.objectives.pairs import PAIRS

ANSWERS = "assistant"
PAIR = ("chosen", "rejected")
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "model", "chatgpt", "assistant"), ANSWERS),
    **dict.fromkeys(("tool", "observation", "function"), "tool"),
    "system": "system",
}
_FORMS = "messages, conversations, prompt and completion, instruction and output"
# A message's own word on whether it is trained on: Axolotl's, OpenAI's.
_TRAINED = ("train", "weight")
# A thought's names; the first one that a message has counts.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# What no text has: halves of surrogate pairs, and what Unicode leaves to programs, such as ours.
_NO_CHARACTER = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")


@dataclasses.dataclass(frozen=True)
class Chat:
    """The messages of a chat."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    trained: list[bool]  # of each answer, whether it may be trained on

    def texts(self) -> Iterator[str]:
        """Yields every text in it, names of fields too."""
        return _texts([self.messages, self.tools])

    def check_answers(self) -> None:
        """Raises a BadRecord if no message has the role `assistant`, but some have a role that is
        unknown here, such as "bot": they may be answers. A chat of questions alone passes."""
        roles = dict.fromkeys(message["role"] for message in self.messages)
        if ANSWERS in roles:
            return
        if others := [role for role in roles if _ROLES.get(role) != role and role != "developer"]:
            raise BadRecord(
                f"has no message of the role {ANSWERS} to train on, but some of {', '.join(others)}"
                f"; call answers {ANSWERS}, or leave the chat out"
            )


def read(record: Mapping[str, Any]) -> Chat:
    """Reads a chat in any of the forms; a BadRecord if it is in none of them."""
    record = {name: value for name, value in record.items() if value is not None}
    messages = [_message(message) for message in _messages(record)]
    if not messages:
        raise BadRecord("has no message; leave it out")
    trained = []
    for message in messages:
        flags = [_is_trained(name, message.pop(name)) for name in _TRAINED if name in message]
        if message["role"] == ANSWERS:
            trained.append(all(flags))
    tools = record.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) or None
        except ValueError as error:
            raise BadRecord(f"tools is not JSON ({error})") from None
    if tools is not None and not isinstance(tools, list):
        raise BadRecord(f"tools is not a list but {describe(tools)}")
    chat = Chat(messages, tools, trained)
    for text in chat.texts():
        if match := _NO_CHARACTER.search(text):
            raise BadRecord(f"a message holds {match[0]!a}, which is not a character; mend it")
    return chat


def read_pair(record: Mapping[str, Any]) -> tuple[Chat, Chat]:
    """Reads the chosen chat and the rejected one, which differ in the last message alone, else a
    BadRecord. Texts, and messages that begin with an answer, continue `prompt`; other messages are
    whole chats."""
    record = {name: value for name, value in record.items() if value is not None}
    if not all(name in record for name in PAIR):
        names = _list_names(record)
        raise BadRecord(f"is not a pair: it has {names}, and pairs have chosen and rejected")
    chosen, rejected = (_read_answer(record, name) for name in PAIR)
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise BadRecord(
            "chosen and rejected differ before their last messages; a pair is two answers to one "
            "prompt"
        )
    return chosen, rejected


def _read_answer(record: Mapping[str, Any], name: str) -> Chat:
    """Reads the chat whose last message is the answer `name` of a pair; a BadRecord if it is
    none."""
    messages = record[name]
    if isinstance(messages, str):
        messages = [{"role": ANSWERS, "content": messages}]
    messages = [_from_sharegpt(message) for message in _check_list(name, messages)]
    prompt = record.get("prompt")
    if messages and isinstance(messages[0], dict) and messages[0].get("role") == ANSWERS:
        if not prompt:
            raise BadRecord(f"{name} answers nothing; give the prompt, or the messages before it")
        messages = [*_prompt_messages(record, prompt), *messages]
    chat = read({"messages": messages, "tools": record.get("tools")})
    role = chat.messages[-1]["role"]
    if role != ANSWERS:
        raise BadRecord(f"{name} ends with a message of the role {role}, and not with an answer")
    return chat


def _messages(record: Mapping[str, Any]) -> list[Any]:
    """Returns the messages of a record, not checked yet; a BadRecord if it has none of the
    forms."""
    if "messages" in record:
        return _check_list("messages", record["messages"])
    if "conversations" in record:
        messages = _check_list("conversations", record["conversations"])
        return [*_system(record), *map(_from_sharegpt, messages)]
    if "prompt" in record and "completion" in record:
        completion = record["completion"]
        if isinstance(completion, str):
            completion = [{"role": ANSWERS, "content": completion}]
        return [*_prompt_messages(record, record["prompt"]), *_check_list("completion", completion)]
    if "instruction" in record and "output" in record:
        parts = {name: x for name in ("instruction", "input") if (x := record.get(name))}
        for name, part in parts.items():
            if not isinstance(part, str):
                raise BadRecord(f"{name} is not text but {describe(part)}")
        answer = {"role": ANSWERS, "content": record["output"]}
        return [*_prompt_messages(record, "\n\n".join(parts.values())), answer]
    names = _list_names(record)
    pairs = f"; {PAIRS.asked_by} reads pairs" if record.keys() >= set(PAIR) else ""
    text = "; use_sft=false trains on text" if "text" in record else ""
    raise BadRecord(f"is not a chat: it has {names}, and chats have {_FORMS}{pairs}{text}")


def _list_names(record: Mapping[str, Any]) -> str:
    return ", ".join(list(record)[:8]) or "nothing"


def _prompt_messages(record: Mapping[str, Any], prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [*_system(record), {"role": "user", "content": prompt}]
    return _check_list("prompt", prompt)


def _system(record: Mapping[str, Any]) -> list[Any]:
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []


def _check_list(name: str, value: Any, what: str = "messages") -> list[Any]:
    if not isinstance(value, list):
        raise BadRecord(f"{name} is not a list of {what} but {describe(value)}")
    return value


def _is_trained(name: str, value: Any) -> bool:
    if value not in (0, 1):
        raise BadRecord(
            f"{name} is {describe(value)}; a message is trained on (true, 1) or not (0)"
        )
    return bool(value)


def _from_sharegpt(message: Any) -> Any:
    """Returns a message of ShareGPT's form with role and content; another one, of any type, as it
    is. A BadRecord for an unknown role."""
    if not isinstance(message, dict) or "from" not in message:
        return message
    role = _ROLES.get(str(message["from"]))
    if not role:
        raise BadRecord(f'a message is from "{message["from"]}"; there are {", ".join(_ROLES)}')
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {"role": role, "content": message.get("value"), **others}


def _message(message: Any) -> dict[str, Any]:
    """Returns a message as transformers gives it to a template, without nulls, and with its thought
    under every name in use; a BadRecord if it is not one of text or calls."""
    if not isinstance(message, dict):
        raise BadRecord(f"a message is not an object but {describe(message)}")
    message = {name: value for name, value in message.items() if value is not None}
    if thoughts := [message[name] for name in THOUGHTS if name in message]:
        message = {"thinking": thoughts[0], **message, "reasoning_content": thoughts[0]}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BadRecord(f"a message's role is {describe(role)}")
    if content is not None and not isinstance(content, str):
        blocks = content if isinstance(content, list) else [content]
        if not all(map(_is_text, blocks)):
            raise BadRecord(f"a message's content is not text but {describe(content)}")
        message["content"] = "".join(block["text"] for block in blocks)
    if content is None and not message.get("tool_calls"):
        raise BadRecord(f"a message of the role {role} has no content")
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in _check_list("tool_calls", calls, "calls")]
    return message


def _is_text(block: Any) -> bool:
    is_text = isinstance(block, dict) and block.get("type", "text") == "text"
    return is_text and isinstance(block.get("text"), str)


def _call(call: Any) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object, which templates take; a BadRecord if it
    is none."""
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict):
        raise BadRecord(f"a tool call is not an object but {describe(function)}")
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])  # OpenAI's; templates take an object
    except ValueError as error:
        raise BadRecord(f"a tool call's arguments are not JSON ({error})") from None
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _texts(value: Any) -> Iterator[str]:
    """Yields all strings of a JSON value, with the names in its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, x in value.items():
            yield name
            yield from _texts(x)
    elif isinstance(value, list):
        for x in value:
            yield from _texts(x)
