"""The section of the configuration that says how the target answers the prompts of a corpus."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.section import NonNegative, Positive, Section


class RegenerateSection(Section):
    """The target's own answers to the chats of data.train_ds; thinking is a matter of model.target.chat_template_kwargs."""

    output: str | None = Field(None, description="folder for answers.jsonl, failed.jsonl, report.json and what resuming needs")
    backend: Literal["local", "server"] = Field("local", description="the target in these processes, or behind chat-completions servers")
    batch_size: Positive = Field(32, description="local: chats that are answered together, a rank")
    servers: tuple[str, ...] = Field((), description="server: base addresses, such as http://host:8000/v1, which share the work")
    model: str | None = Field(None, description="server: the target's name there; default: model.target.path")
    api_key_env: str | None = Field(None, description="server: environment variable that holds the API key; default: none is sent")
    concurrency: Positive = Field(64, description="server: requests in flight, over all addresses")
    max_retries: NonNegative = Field(8, description="server: further tries after no connection, time-out, 429 or 5xx")
    backoff_seconds: Annotated[float, Field(gt=0)] = Field(
        1.0, description="server: pause before the first further try; doubles up to 60, less or more by a random half"
    )
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(600.0, description="server: for one answer, from question to last byte")
    max_new_tokens: Positive = Field(2048, description="tokens of one answer, thinking included; a longer one is cut, and counted")
    temperature: Annotated[float, Field(ge=0)] = Field(0.0, description="0: greedy, what a draft is usually asked to predict")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="only the likeliest tokens that make up this share")
    top_k: Positive | None = Field(None, description="only so many of the likeliest tokens; default: all")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(0, description="of sampling; each turn of each row has its own numbers")
    keep_reasoning: bool = Field(True, description="false: the thinking is left out of the rows that are written")

    @model_validator(mode="after")
    def _addresses(self) -> "RegenerateSection":
        for address in self.servers:
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"servers: {address!r} is no address; give one such as http://host:8000/v1")
            if "@" in address.split("//", 1)[1].split("/", 1)[0]:  # it would be in logs and in the record of the run
                raise ValueError(
                    "servers: an address holds a user name or password; name an environment variable with the key in api_key_env"
                )
        return self
