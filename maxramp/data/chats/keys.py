"""The keys of chats."""

import dataclasses
from collections.abc import Sequence

from maxramp.keys.section import Keys, day, form, one_of


@dataclasses.dataclass(frozen=True)
class ChatKeys(Keys):
    """How chats become text, and which of it is trained on."""

    use_sft: bool
    use_dpo: bool
    sft_train_on_completion_only: bool
    sft_train_on_last_answer_only: bool
    chat_template: str
    chat_template_date: str = day()
    chat_template_switches: Sequence[str] = form(
        "[^=]+=.*", "must be names with values, such as [enable_thinking=false]"
    )
    long_chats: str = one_of("leave_out", "cut")
    chats_with_marks: str = one_of("refuse", "leave_out")

    @property
    def reads_chats(self) -> str:
        """The key that asks for chats, with its value; "" where the data is text."""
        return next((f"{name}=True" for name in ("use_dpo", "use_sft") if getattr(self, name)), "")
