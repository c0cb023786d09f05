"""A chat while it is answered, turn by turn, and how it ends. Both backends write their rows through this."""

from dataclasses import dataclass

from pipeline.corpus.places import THINKING_CUT
from pipeline.corpus.rows import Message
from pipeline.regenerate.journal import Ended
from pipeline.regenerate.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn of the target. `message` is the assistant's, with `content` and, if there are any, `reasoning_content` and `tool_calls`.

    `finish_reason`: "stop", "length" (cut at the token limit) or "tool_calls". `exact` as in `Ended`.
    """

    message: Message
    finish_reason: str
    num_tokens: int
    exact: bool | None = None


class Chat:
    """The messages so far: what the row asked and what the target answered to it."""

    def __init__(self, prompt: Prompt, keep_reasoning: bool) -> None:
        self.prompt = prompt
        self.turn = 0
        self.messages: list[Message] = list(prompt.turns[0])
        self._keep_reasoning = keep_reasoning
        self._num_tokens = 0
        self._exact: bool | None = None

    def take(self, answer: Answer) -> Ended | None:
        """Add the target's answer and the messages after it; how the chat ended, if it did."""
        self._num_tokens += answer.num_tokens
        if answer.exact is not None:
            self._exact = answer.exact and self._exact is not False
        message = dict(answer.message)
        empty = not message.get("content") and not message.get("tool_calls")
        if answer.finish_reason == "length" and empty and message.get("reasoning_content"):
            return self.fail(THINKING_CUT, "the token limit came before the answer; raise regenerate.max_new_tokens")
        if not self._keep_reasoning:
            message.pop("reasoning_content", None)
        self.messages.append(message)
        self.turn += 1
        turns = self.prompt.turns
        # After a cut answer the target would not have been asked on, and a call of a tool has no result here.
        if answer.finish_reason == "stop" and self.turn < len(turns):
            self.messages.extend(turns[self.turn])
            return None
        tools = {"tools": self.prompt.tools} if self.prompt.tools else {}
        return Ended(
            index=self.prompt.index,
            state="cut" if answer.finish_reason == "length" else "done",
            row={**self.prompt.place, **tools, "messages": self.messages, "finish_reason": answer.finish_reason},
            num_tokens=self._num_tokens,
            exact=self._exact,
            shortened=self.prompt.shortened or self.turn < len(turns),
        )

    def fail(self, reason: str, detail: str = "", *, again: bool = False) -> Ended:
        """The chat is given up; what was answered of it is not kept. `again`: the next run tries it once more."""
        return failed(self.prompt, reason, detail, num_tokens=self._num_tokens, again=again)


def failed(prompt: Prompt, reason: str, detail: str = "", *, num_tokens: int = 0, again: bool = False) -> Ended:
    return Ended(prompt.index, "failed", prompt.place, num_tokens=num_tokens, reason=reason, detail=detail or None, again=again)
