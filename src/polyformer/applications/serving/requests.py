"""Requests of OpenAI's API as checked values. A wrong one names its parameter in the error.

Parameters that would change the result and have no counterpart are refused by name, unless they have the
value that changes nothing: `logit_bias`, `suffix`, `best_of`, `dimensions`. Parameters
that describe the client are ignored: `user`, `metadata`, `store`, `service_tier`. Beyond OpenAI's there are
`top_k`, `min_p` and `repetition_penalty`, and for chats `continue_final_message` and `chat_template_kwargs`.

Types are strict: "5" is no number, and 1 is not true.
"""

import re
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from polyformer.applications.serving.tools import with_objects

STOPS, STOP_LENGTH = 16, 256
"""The most stop strings, and characters of each."""

SCORED, CHOICES, PROMPTS, MESSAGES, TOOLS = 20, 128, 256, 4096, 128
"""The most probable tokens in a token's place, texts for a prompt, prompts, messages and tools."""

FUNCTION = re.compile("[a-zA-Z0-9_-]{1,64}")
"""The name of a function."""

ROLES = "system", "developer", "user", "assistant", "tool", "function"


def texts_of(value: Any) -> Any:
    """Return stop strings as a tuple."""
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError("expected a text or a list of texts")
    if len(texts) > STOPS or not all(0 < len(text) <= STOP_LENGTH for text in texts):
        raise ValueError(f"expected at most {STOPS} texts of 1 to {STOP_LENGTH} characters")
    return tuple(texts)


Prompt: TypeAlias = str | list[int]


def prompts_of(value: Any) -> list[Prompt]:
    """Return prompts, each a text or token ids, of a value in any of the four forms."""
    if isinstance(value, str) or _are_ids(value):
        return [value]
    if not isinstance(value, list) or not value or len(value) > PROMPTS:
        raise ValueError(f"expected a text, token ids, or a list of 1 to {PROMPTS} of these")
    if not (all(isinstance(item, str) for item in value) or all(map(_are_ids, value))):
        raise ValueError("expected a list of texts, or a list of lists of token ids")
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Return messages with texts as their content; parts that are texts are joined."""
    if not isinstance(value, list) or not 1 <= len(value) <= MESSAGES:
        raise ValueError(f"expected a list of 1 to {MESSAGES} messages")
    return [_message(item, f"message {number}") for number, item in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected an object with a role and content")
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise ValueError(f"{name}: expected a role of {', '.join(ROLES)}")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{name}: only parts of the type text are supported")
        content = "".join(map(str, parts))
    if content is not None and not isinstance(content, str):
        raise ValueError(f"{name}: expected a text or a list of parts as its content")
    if content is None and not value.get("tool_calls"):
        raise ValueError(f"{name}: it has no content")
    role = "system" if role == "developer" else role
    return {**with_objects(value, name), "role": role, "content": content}


def tools_of(value: Any) -> Any:
    """Return tools, each a function with a name; an empty list is as none."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) > TOOLS:
        raise ValueError(f"expected a list of at most {TOOLS} tools")
    for number, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise ValueError(f"tool {number}: expected the type function, and an object as its function")
        if not isinstance(function.get("name"), str) or not FUNCTION.fullmatch(function["name"]):
            raise ValueError(f"tool {number}: expected a name of 1 to 64 letters, digits, _ and -")
        if not isinstance(function.get("parameters", {}), dict):
            raise ValueError(f"tool {number}: expected a JSON schema as its parameters")
    return value


def only(*values: Any) -> AfterValidator:
    """Return the check of a parameter that is supported only with these values."""

    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError("not supported; leave it out")
        return value

    return AfterValidator(check)


COLDEST = 1e-4
"""The least temperature above 0: logits that are divided by less overflow."""


def warm(value: float) -> float:
    """Return a temperature; raise `ValueError` if it is too small."""
    if 0 < value < COLDEST:
        raise ValueError(f"expected 0, for a greedy search, or {COLDEST} or more")
    return value


Count = Annotated[int, Field(ge=0, le=2**20)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class ModelRequest(BaseModel):
    """The fields of all requests."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: Annotated[str, Field(max_length=1024)]
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False


class TextRequest(ModelRequest):
    """A request for texts."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False), AfterValidator(warm)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=1, le=2**20)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10, allow_inf_nan=False)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES)] | None = None
    stop: Annotated[Any, BeforeValidator(texts_of)] = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[Any, only(None, {})] = None

    @property
    def count(self) -> int:
        """The number of texts for a prompt."""
        return self.n or 1

    @property
    def scored(self) -> int | None:
        """The number of probable tokens to report for each token; None for no scores."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Return the generation settings that the request names; a temperature of 0 is a greedy search."""
        names = "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"
        named = {name: value for name in names if (value := getattr(self, name)) is not None}
        if "seed" in named:
            named["seed"] %= 2**63
        if self.temperature == 0:
            named = {name: named[name] for name in ("repetition_penalty",) if name in named}
            named["do_sample"] = False
        return named


class CompletionRequest(TextRequest):
    """A request of /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(prompts_of)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=SCORED)] | None = None
    suffix: Annotated[Any, only(None, "")] = None
    best_of: int | None = None

    @model_validator(mode="after")
    def check_best(self) -> Self:
        """Refuse a choice among more texts than are returned."""
        if self.best_of not in (None, self.count):
            raise ValueError("best_of: not supported; leave it out")
        return self

    @property
    def scored(self) -> int | None:
        """See `TextRequest.scored`."""
        return self.logprobs


class NamedSchema(BaseModel):
    """A JSON schema with a name. strict: replies follow every schema, so that it changes nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    content: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form of a reply: any text, any JSON object, or JSON by a schema."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        """Refuse a type without its schema, and a schema without its type."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("expected json_schema exactly with the type json_schema")
        return self

    @property
    def wanted(self) -> dict[str, Any] | None:
        """The JSON schema of the reply; None for any text."""
        if self.json_schema is not None:
            return self.json_schema.content
        return {"type": "object"} if self.type == "json_object" else None


class ChatRequest(TextRequest):
    """A request of /v1/chat/completions."""

    messages: Annotated[Any, BeforeValidator(messages_of)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=SCORED)] | None = None
    tools: Annotated[Any, BeforeValidator(tools_of)] = None
    tool_choice: Annotated[Any, only(None, "none", "auto")] = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False

    @property
    def scored(self) -> int | None:
        """See `TextRequest.scored`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The functions that the model may call."""
        return None if self.tool_choice == "none" else self.tools

    def rendering(self) -> dict[str, Any]:
        """Return the options of `ChatTemplate.render`."""
        reserved = {"messages", "tools", "documents", "name", "add_generation_prompt"}
        variables = {
            name: value for name, value in (self.chat_template_kwargs or {}).items() if name not in reserved
        }
        ends = {"continue_final_message": self.continue_final_message}
        ends["add_generation_prompt"] = not self.continue_final_message
        return {**variables, "tools": self.shown_tools, **ends}


def inputs_of(value: Any) -> list[str]:
    """Return the texts of a request for vectors."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or len(texts) > PROMPTS * 8:
        raise ValueError(f"expected a text or a list of 1 to {PROMPTS * 8} texts")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("expected texts; token ids are not supported")
    return texts


class EmbeddingRequest(ModelRequest):
    """A request of /v1/embeddings."""

    input: Annotated[Any, BeforeValidator(inputs_of)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Any, only(None)] = None
