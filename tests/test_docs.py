"""What the documentation names exists: files, names, commands, options, endpoints and links."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath

import click
import pytest
from fastapi import FastAPI
from starlette.routing import Match

from core.test_kv_layout import layout_of, vllm_s_layout
from octavo.cli.main import main
from octavo.config import make_config
from octavo.registry import GROUP as PLUGINS
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.supervision import Supervision
from octavo.server.http.app import create_app
from octavo.server.http.settings import ServerSettings
from octavo.server.observability.observation import Observation
from octavo_paper.command import reproduce

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = ("src", "tests", "benchmarks", "docs", "tools", "examples", "paper", "demo")
FOLDERS = ("*.md", "docs/*.md", "demo/*.md", "paper/*.md", "benchmarks/**/*.md", "src/**/*.md")
DOCUMENTS = sorted(path for pattern in FOLDERS for path in ROOT.glob(pattern))
PROGRAMS = ("benchmarks", "tools", "tests", "demo", "paper")  # have options of their own

FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}.*(?:\n|\Z))+")
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*\.(?:py|md|mjs|json|csv|png)|(?:[\w.*-]+/)+[\w.*-]*")
MODULE = re.compile(r"octavo(?:_\w+)?(?:\.\w+)+")
MEMBER = re.compile(r"([A-Z][a-z]\w+)\.(\w+)")
CONSTANT = re.compile(r"[A-Z]+(?:_[A-Z0-9]+)+")
COMMAND = re.compile(r"(?:\$ )?(?:\S*/)?octavo (?=[\w\[-])(.+)")
PROGRAM = re.compile(r"(?:\S*/)?python ((?:benchmarks|tools|tests)/\S+\.py)(.*)")
ENDPOINT = re.compile(r"(?:(GET|POST|DELETE|HEAD) )?(/[\w./-]*)")
URL = re.compile(r"(?:localhost|127\.0\.0\.1):8000(/[\w./-]*)")
DELEGATED = {"reproduce": reproduce}  # commands that pass their options to another one
# Documents in which a span that begins with a slash is an endpoint.
ENDPOINT_DOCUMENTS = {"server.md", "observability.md"}


@dataclass(frozen=True)
class Document:
    """A Markdown file: its prose, and what it shows as code."""

    path: Path
    prose: str  # without code blocks
    spans: tuple[str, ...]  # code in the prose
    lines: tuple[str, ...]  # of code blocks, with continuation lines joined

    @property
    def code(self) -> tuple[str, ...]:
        return self.spans + self.lines


@cache
def read(path: Path) -> Document:
    text = path.read_text(encoding="utf-8")
    blocks = FENCE.findall(text)
    prose = FENCE.sub("", text)
    blocks += INDENTED.findall(prose)
    prose = INDENTED.sub("", prose)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = [" ".join(span.split()) for span in SPAN.findall(prose)]
    return Document(path, prose, tuple(spans), tuple(lines))


@cache
def entries() -> frozenset[PurePosixPath]:
    """Files and directories of the repository, relative to its root."""
    found = [each for top in TOP_LEVEL for each in [ROOT / top, *(ROOT / top).rglob("*")]]
    found += [each for each in ROOT.iterdir() if each.is_file()]
    relative = (each.relative_to(ROOT) for each in found if "__pycache__" not in each.parts)
    return frozenset(PurePosixPath(each.as_posix()) for each in relative)


def exists(name: str) -> bool:
    """Whether a file or directory ends with this path.

    An asterisk, or a word in capitals such as NAME, stands for any name.
    """
    wanted = PurePosixPath(re.sub(r"\b[A-Z]{2,}\b(?=\.py)", "*", name))
    return any(each.match(wanted.as_posix()) for each in entries())


@cache
def members() -> dict[str, set[str]]:
    """Class name -> names of its methods and attributes, inherited ones included."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in (path for top in ("src", "paper", "demo") for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                own.setdefault(node.name, set()).update(names_in(node))
                inherited = {base.id for base in node.bases if isinstance(base, ast.Name)}
                bases.setdefault(node.name, set()).update(inherited)

    def collect(name: str) -> set[str]:
        parents = [collect(base) for base in bases.get(name, set()) - {name}]
        return own.get(name, set()).union(*parents)

    return {name: collect(name) for name in own}


def names_in(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        match each:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


@cache
def sources() -> str:
    """All Python code, for a search by words; this file is left out."""
    paths = (path for top in TOP_LEVEL for path in (ROOT / top).rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths if path != Path(__file__)]
    return "\n".join(texts)


@cache
def own_options() -> set[str]:
    """Options of benchmarks, tools and the like, which parse their own arguments."""
    paths = (path for top in PROGRAMS for path in (ROOT / top).rglob("*.py"))
    texts = (path.read_text(encoding="utf-8") for path in paths if path != Path(__file__))
    return {option for text in texts for option in re.findall(r'"(--[\w-]+)"', text)}


def options_of(command: click.Command) -> set[str]:
    names = {"--help"}
    for parameter in command.params:
        names.update(parameter.opts, parameter.secondary_opts)
    return names


def all_options(command: click.Command = main) -> set[str]:
    """Options of a command and of all of its subcommands."""
    names = options_of(command)
    if isinstance(command, click.Group):
        names = names.union(*map(all_options, command.commands.values()))
    return names


def mistakes_in_command(line: str) -> Iterator[str]:
    """Subcommands and options of an `octavo ...` line that do not exist."""
    command: click.Command = main
    for word in shlex.split(line.replace("[", "").replace("]", ""), comments=True):
        if isinstance(command, click.Group) and re.fullmatch(r"[a-z][a-z-]*", word):
            if word not in command.commands:
                yield f"octavo {line}: there is no command {word}"
                return
            command = DELEGATED.get(word, command.commands[word])
        elif word.startswith("--") and word.partition("=")[0] not in options_of(command):
            yield f"octavo {line}: {command.name} has no option {word}"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """The server's application, with files; no engine runs."""
    observation = Observation("demo")
    client = EngineClient(make_config("demo"), Supervision(), observation.listeners)
    settings = ServerSettings(("demo",), files_dir=str(tmp_path_factory.mktemp("files")))
    application = create_app(client, settings, observation.routers(client))
    yield application
    application.state.context.files.close()


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def document(request: pytest.FixtureRequest) -> Document:
    path: Path = request.param
    return read(path)


def test_files_exist(document: Document) -> None:
    missing = []
    for span in document.spans:
        name, _, test = span.partition("::")
        name = name.removesuffix("/")
        is_path = PATH.fullmatch(span.partition("::")[0])
        if not is_path or (name.startswith("/") or name.startswith(".")):
            continue
        is_ours = name.endswith((".py", ".md")) or name.partition("/")[0] in TOP_LEVEL
        if (is_ours or span.endswith("/")) and not exists(name):
            missing.append(span)
        if test and f"def {test}(" not in (ROOT / name).read_text(encoding="utf-8"):
            missing.append(span)
    assert missing == []


def test_files_in_commands_exist(document: Document) -> None:
    words = [word for line in document.code if " " in line for word in line.split()]
    named = {word for word in words if word.startswith(tuple(f"{top}/" for top in TOP_LEVEL))}
    assert [name for name in named if not (ROOT / name.split("::")[0]).exists()] == []


def test_names_exist(document: Document) -> None:
    missing = []
    for span in document.spans:
        name = span.partition("(")[0]
        if MODULE.fullmatch(name):
            if name != PLUGINS and not is_importable(name):
                missing.append(span)
        elif member := MEMBER.fullmatch(name):
            if member[2] not in members().get(member[1], set()):
                missing.append(span)
        elif CONSTANT.fullmatch(name) and not re.search(rf"\b{name}\b", sources()):
            missing.append(span)
    assert missing == []


def is_importable(name: str) -> bool:
    """Whether a dotted name is a module, or something that a module defines."""
    parent, _, last = name.rpartition(".")
    if find_module(name) is not None:
        return True
    spec = find_module(parent)
    if spec is None or spec.origin is None:
        return False
    return re.search(rf"\b{last}\b", Path(spec.origin).read_text(encoding="utf-8")) is not None


def find_module(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of a parent
        return None


def test_commands_and_options_exist(document: Document) -> None:
    mistakes: list[str] = []
    for line in document.code:
        if command := COMMAND.fullmatch(line):
            mistakes += mistakes_in_command(command[1])
        elif program := PROGRAM.fullmatch(line):
            text = (ROOT / program[1]).read_text(encoding="utf-8")
            words = shlex.split(program[2], comments=True)
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            mistakes += [f"{program[1]} has no {each}" for each in options if each not in text]
    known = all_options() | own_options()
    for span in document.spans:
        if (option := re.match(r"--[\w-]+", span)) and option[0] not in known:
            mistakes.append(f"no program has the option {span}")
    assert mistakes == []


def test_endpoints_exist(document: Document, app: FastAPI) -> None:
    is_reference = document.path.name in ENDPOINT_DOCUMENTS
    named: list[tuple[str, str]] = []
    for code in document.spans:
        endpoint = ENDPOINT.match(code)
        if endpoint and (endpoint[1] or is_reference or code.startswith("/v1/")):
            named.append((endpoint[1] or "", endpoint[2]))
    named += [("", path) for line in document.code for path in URL.findall(line)]
    assert [each for each in named if not is_served(app, *each)] == []


def is_served(app: FastAPI, method: str, path: str) -> bool:
    """Whether a route answers this method and path; without a method, a common prefix will do."""
    scope = {"type": "http", "path": path, "root_path": "", "method": method, "headers": []}
    matches = {route.matches(scope)[0] for route in app.routes}
    if method:
        return Match.FULL in matches
    is_prefix = any(known.startswith(f"{path}/") for known in app.openapi()["paths"])
    return is_prefix or Match.PARTIAL in matches


def test_links_lead_somewhere(document: Document) -> None:
    broken = []
    for target in LINK.findall(document.prose):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (document.path.parent / name).resolve() if name else document.path
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = (heading.lower().replace(" ", "-") for heading in HEADING.findall(read(path).prose))
    return {re.sub(r"[^\w-]", "", heading) for heading in headings}


def test_mistakes_are_found(app: FastAPI) -> None:
    assert list(mistakes_in_command("bench serve --url http://127.0.0.1:8000  # a comment")) == []
    [no_command] = mistakes_in_command("bench nothing")
    assert "no command nothing" in no_command
    [no_option] = mistakes_in_command("serve DIR --no-such-option 3")
    assert "serve has no option --no-such-option" in no_option
    assert not exists("core/no_such_module.py")
    assert exists("core/scheduler.py")
    assert not is_importable("octavo.core.no_such_module")
    assert not is_importable("octavo.core.scheduler.NoSuchClass")
    assert is_importable("octavo.core.scheduler.Scheduler")
    assert "schedule" in members()["Scheduler"]
    assert is_served(app, "POST", "/v1/completions")
    assert not is_served(app, "DELETE", "/v1/completions")
    assert not is_served(app, "", "/v1/no_such_endpoint")


def test_the_table_of_layouts() -> None:
    """docs/kv_cache.md: groups, and memory at 2k and 32k tokens, ours and vLLM's."""
    text = (ROOT / "docs/kv_cache.md").read_text(encoding="utf-8")
    pattern = r"^\| (?:.*: )?(\d+) \+ (\d+) \| ([\d,]+) \| (.*) \|$"
    rows = re.findall(pattern, text, re.MULTILINE)
    assert len(rows) == 16
    for *numbers, shown in rows:
        num_full, num_sliding, window = (int(number.replace(",", "")) for number in numbers)
        ours = layout_of((None, num_full), (window, num_sliding))
        theirs = vllm_s_layout(num_full, num_sliding, window)
        assert shown == " | ".join(
            f"{len(layout.groups)} | {layout.relative_bytes([2048]):.3f} | "
            f"{layout.relative_bytes([32_768]):.3f}"
            for layout in (ours, theirs)
        )
