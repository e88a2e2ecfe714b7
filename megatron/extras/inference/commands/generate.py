"""Continue texts with a checkpoint's model.

    python tools/generate.py --load DIR --prompt "Once upon a time"
    python tools/generate.py --load DIR --prompt-file prompts.txt --json > texts.jsonl
    python tools/generate.py --load DIR --interactive
    python tools/generate.py --load DIR --interactive --chat
    torchrun --nproc-per-node 4 tools/generate.py --load DIR --prompt "Once upon a time"
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

The last form divides a model that does not fit on one device. A checkpoint of any parallel layout
can be loaded in each form.
"""

import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.base.errors import ConfigError, DataError
from megatron.base.outside_file import load_text, parse_json
from megatron.base.plain_text import print_line, print_to_stderr
from megatron.config.data import TokenizerConfig
from megatron.console.parse import parse_arguments
from megatron.console.run_on_ranks import run_on_ranks
from megatron.extras.inference.generate.generation import (
    CONTEXT_LENGTH,
    Continuation,
    GenerationOptions,
    check_prompt,
    generate,
)
from megatron.extras.inference.generate.load import (
    SIZES,
    ModelArguments,
    check_at_least,
    load,
    store_for_single_prompts,
)
from megatron.extras.inference.generate.sampling import SamplingOptions, check_sampling
from megatron.extras.samples.chat.template import (
    load_chat_template,
    read_special_tokens,
    remove_tags,
)
from megatron.parallel.mesh import Mesh
from megatron.parallel.messages import broadcast_json
from megatron.parallel.ranks import Work
from megatron.plan.rules.finding import Finding, error, refuse_errors
from megatron.tokenizer.build import Tokenizer


class ChatSession:
    """Makes prompts of questions. With a history, each follows the earlier turns."""

    def __init__(
        self, config: TokenizerConfig, tokenizer: Tokenizer, file: str | None, *, history: bool
    ) -> None:
        """Load the template, and let texts have special tokens.

        Args:
            config: Settings of the tokenizer.
            tokenizer: The tokenizer. A text that spells a special token has it from now on.
            file: The template. None: the tokenizer's own.
            history: Whether questions belong together.

        Raises:
            ConfigError: There is no template, or the tokenizer has no special tokens.
        """
        # A prompt has the special tokens of its template.
        read_special_tokens(tokenizer)
        self._template = load_chat_template(config, file)
        self._history = history
        self._messages: list[dict[str, str]] = []

    @property
    def stop(self) -> tuple[str, ...]:
        """The text that ends an answer, or nothing if only the end of a document does."""
        # A template may end the text after the turn. A turn ends at its first line.
        end = self._template.probe.after.strip().partition("\n")[0]
        return tuple(filter(None, [end]))

    def make_prompts(self, questions: Sequence[str]) -> list[str]:
        """Return the prompt of each question.

        Raises:
            ConfigError: The template refuses one.
        """
        try:
            return [
                remove_tags(self._template.render([*self._messages, ask(question)], prompt=True))
                for question in questions
            ]
        except DataError as error:
            raise ConfigError(str(error)) from error

    def keep(self, question: str, answer: str) -> None:
        """Remember an answer, if there is a history."""
        # The prompts of a file are independent questions.
        if self._history:
            self._messages += self._template.make_turn(self._messages, ask(question), answer)


def ask(question: str) -> dict[str, str]:
    """Return the message of a question."""
    return {"role": "user", "content": question}


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file. Empty lines are left out.

    Raises:
        ConfigError: The file cannot be read, has no prompt, is not UTF-8, or has a line of another
            form.
    """
    try:
        lines = load_text(path).split("\n")
    except OSError as error:
        raise ConfigError(f"--prompt-file {path} cannot be read: {error.strerror}") from error
    if path.suffix == ".jsonl":
        prompts = list(_parse_objects(path, lines))
    else:
        prompts = [line.rstrip("\r") for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompt-file {path} has no prompt; give one a line")
    return prompts


def _parse_objects(path: Path, lines: Sequence[str]) -> Iterator[str]:
    """Yield the prompts of a .jsonl file.

    Raises:
        ConfigError: A line has another form.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = parse_json(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise ConfigError(
                f'--prompt-file {path}: line {number} must have the form {{"prompt": "a text"}}'
            )
        yield prompt


def check_text(text: str, name: str) -> None:
    """Check that a prompt is UTF-8 text. Other bytes were decoded as halves of surrogate pairs.

    Raises:
        ConfigError: It is not. The message starts with `name`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text: character {error.start + 1} is {text[error.start]!r}; give "
            "valid text"
        ) from error


def prepare_input() -> None:
    """Decode bytes of standard input that are not UTF-8 as halves of surrogate pairs.

    Raises:
        ConfigError: There is no standard input.
    """
    # It is None if the file descriptor is closed.
    if sys.stdin is None:
        raise ConfigError("--interactive reads standard input, which is closed; use --prompt")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")


def read_line() -> str | None:
    """Return a line of standard input without its end, or None after the last one."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        return None
    return line.rstrip("\r\n")


_BETWEEN_TEXTS = "---"
_ROUND_SECONDS = 0.2
"""Seconds between two messages to the other ranks while rank 0 waits for a line."""


@dataclass(frozen=True)
class GenerateArguments(ModelArguments):
    """The command line."""

    prompt: str | None = None
    """The text to continue."""
    prompt_file: Path | None = None
    """File with one prompt a line, or with objects {"prompt": TEXT} if it ends in .jsonl."""
    interactive: bool = False
    """Read prompts from standard input, and answer each immediately."""
    max_new_tokens: int = 60
    """Tokens to add. The end-of-document token ends the text earlier, and so does the sequence
    length of the training, which prompt and continuation share."""
    temperature: float = 0.8
    """Divides the logits. 0 always takes the most likely token."""
    top_k: int = 40
    """Sample from the k most likely tokens. 0 samples from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that have this probability together."""
    repetition_penalty: float = 1.0
    """Values above 1 make tokens less likely that the text has already."""
    stop: tuple[str, ...] = ()
    """Strings that end the text. They are not printed."""
    seed: int = 1234
    """Seed of the sampling. With the same seed, a prompt gives the same text in any batch."""
    batch_size: int = 8
    """Prompts of --prompt-file that are continued together."""
    chat: bool = False
    """Put each prompt into the chat template, as a question of a user. The end of a turn ends the
    answer. With --interactive, later questions follow earlier ones."""
    chat_template: str | None = None
    """With --chat: file of the template. Default: that of the tokenizer."""
    json: bool = False
    """Print an object for each prompt, on one line: prompt, text, tokens, and reason of the end."""


def check_arguments(arguments: GenerateArguments) -> Iterator[Finding]:
    """Check that there is one source of texts, and that each value is in its range."""
    sources = (arguments.prompt is not None, arguments.prompt_file is not None)
    if sum(sources) + arguments.interactive != 1:
        yield error(
            "no text to continue, or several sources of it: give one of --prompt, --prompt-file "
            "and --interactive"
        )
    yield from check_sampling(choose_sampling(arguments))
    yield from check_at_least(arguments, {"max_new_tokens": 0, **SIZES})
    if arguments.chat_template is not None and not arguments.chat:
        yield error(f"--chat-template {arguments.chat_template} needs --chat. Give it too.")
    if "" in arguments.stop:
        yield error("--stop '' is empty; it would end each text before it starts")


def choose_sampling(arguments: GenerateArguments) -> SamplingOptions:
    """Return the part of the command line that describes the sampling."""
    return SamplingOptions(
        arguments.temperature,
        arguments.top_k,
        arguments.top_p,
        arguments.repetition_penalty,
        arguments.seed,
    )


class TextGenerator:
    """A checkpoint's model and its tokenizer, with the options of the command line."""

    def __init__(self, arguments: GenerateArguments, options: GenerationOptions, mesh: Mesh):
        """Load the checkpoint.

        Raises:
            CheckpointError: There is no checkpoint to load.
            ConfigError: The tokenizer is not the one of the training, or cannot be read.
        """
        self._arguments = arguments
        self._options = options
        self._mesh = mesh
        self._prints = mesh.rank == 0
        self._model, self._tokenizer, _, config = load(arguments, mesh)
        self._chat: ChatSession | None = None
        if arguments.chat:
            self._chat = ChatSession(
                config, self._tokenizer, arguments.chat_template, history=arguments.interactive
            )
            self._options = replace(options, stop_strings=(*options.stop_strings, *self._chat.stop))

    def continue_prompts(self, prompts: Sequence[str]) -> None:
        """Print the continuation of each prompt.

        Raises:
            ConfigError: A prompt is empty, too long or not valid text. Nothing was generated.
        """
        for number, text in enumerate(prompts, 1):
            check_text(text, self._name_prompt(number))
        texts = prompts if self._chat is None else self._chat.make_prompts(prompts)
        ids = self._tokenizer.encode_batch(list(texts))
        for number, prompt in enumerate(ids, 1):
            check_prompt(prompt, self._model, self._name_prompt(number))
        if len(prompts) == 1 and not self._arguments.json:
            self._stream(prompts[0], ids[0])
            return
        size = self._arguments.batch_size
        for start in range(0, len(ids), size):
            group = ids[start : start + size]
            results = generate(self._model, self._tokenizer, group, self._options)
            for row, result in enumerate(results, start):
                self._print_result(row + 1, prompts[row], result)

    def prepare_single_prompts(self) -> None:
        """Make generation for one prompt at a time faster."""
        store_for_single_prompts(self._model)

    def answer_lines(self) -> None:
        """Continue each line of standard input, until its end.

        Raises:
            ConfigError: Rank 0 has no standard input.
        """
        if self._prints:
            prepare_input()
        while True:
            line = self._receive_line()
            if line is None:
                return
            if not line:
                continue
            # A prompt that is too long must not end the session.
            try:
                self.continue_prompts([line])
            except ConfigError as error:
                self._print_error(str(error))

    def _receive_line(self) -> str | None:
        """Return the next line of rank 0's standard input, or None after the last one.

        A person may type after minutes. So the other ranks do not wait in one collective, which
        would time out.
        """
        reading = None
        if self._prints:
            reading = Work(read_line, in_thread=self._mesh.grid.world_size > 1)
        while True:
            outcome = None
            if reading is not None:
                reading.wait(_ROUND_SECONDS)
                outcome = [reading.done, reading.result]
                if reading.error is not None:
                    raise reading.error
            done, line = broadcast_json(outcome, self._mesh.control)
            if done:
                return line

    def _name_prompt(self, number: int) -> str:
        if self._arguments.prompt_file is not None:
            return f"--prompt-file {self._arguments.prompt_file}: prompt {number}"
        if self._arguments.interactive:
            return "the prompt"
        return "--prompt"

    def _stream(self, prompt: str, ids: list[int]) -> None:
        """Print a text while it is generated."""

        def show(index: int, text: str) -> None:
            if self._prints:
                print(text, end="", flush=True)

        # The answer alone is a turn of a conversation.
        show(0, prompt if self._chat is None else "")
        (result,) = generate(self._model, self._tokenizer, [ids], self._options, show)
        show(0, "\n")
        if self._chat is not None:
            self._chat.keep(prompt, result.text)
        self._warn_about_context(1, result)

    def _print_result(self, number: int, prompt: str, result: Continuation) -> None:
        """Print the text of one of several prompts, or its JSON object."""
        if self._prints and self._arguments.json:
            facts = {
                "prompt": prompt,
                "text": result.text,
                "new_tokens": len(result.ids),
                "reason": result.reason,
            }
            print(json.dumps(facts, ensure_ascii=False), flush=True)
        elif self._prints:
            if number > 1:
                print_line(_BETWEEN_TEXTS)
            print((prompt if self._chat is None else "") + result.text, flush=True)
        self._warn_about_context(number, result)

    def _warn_about_context(self, number: int, result: Continuation) -> None:
        if result.reason == CONTEXT_LENGTH:
            self._print_error(
                f"{self._name_prompt(number)}: the text ends after {len(result.ids)} new tokens, "
                f"at the model's context of {self._model.shape.config.seq_length} tokens",
                "warning",
            )

    def _print_error(self, message: str, kind: str = "error") -> None:
        if self._prints:
            print_to_stderr(f"{kind}: {message}")


def collect_prompts(arguments: GenerateArguments) -> list[str]:
    """Return the prompts of the command line, none if they are typed.

    Raises:
        ConfigError: See `read_prompts`.
    """
    if arguments.prompt is not None:
        return [arguments.prompt]
    if arguments.prompt_file is not None:
        return read_prompts(arguments.prompt_file)
    return []


def run(arguments: GenerateArguments) -> None:
    """Print what the command line asks for.

    Raises:
        MegatronError: An argument, the checkpoint or the tokenizer is at fault.
    """
    refuse_errors(check_arguments(arguments))
    sampling = choose_sampling(arguments)
    options = GenerationOptions(arguments.max_new_tokens, sampling, arguments.stop)
    with arguments.join_ranks() as mesh:
        # A file could differ between hosts, so rank 0 reads it for all.
        prompts = mesh.ranks.call_on_rank_0(
            lambda: collect_prompts(arguments), "reading the prompts"
        )
        together = min(max(len(prompts), 1), arguments.batch_size)
        generator = TextGenerator(arguments, options, mesh)
        if together == 1:
            generator.prepare_single_prompts()
        if arguments.interactive:
            generator.answer_lines()
        else:
            generator.continue_prompts(prompts)


def main(argv: list[str] | None = None) -> int:
    """Print the continuations that `argv` asks for and return the exit code."""
    arguments = parse_arguments(GenerateArguments, args=argv, description=__doc__)
    return run_on_ranks(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
