"""The code that travels: what a portable checkpoint needs of this package, as one flat module, cut from its source.

Roots (a scheme, the steps of its plan, the loader) are followed through every name that they mention. Top-level
statements are taken whole and as they are written, in the order in which Python would run them; imports within the
package fall away, since all of it is one module then.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import anatomies
from .anatomy import Anatomy, held, is_declaration, own_attention
from .errors import PosSwapError
from .saving import CODE, Travel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .scheme import Scheme

PACKAGE = __name__.partition(".")[0]

HEADER = '''"""The positions of this model were swapped by hf_posswap {version}: this module, cut from it, loads it.

    {auto}.from_pretrained(folder, trust_remote_code=True)
"""

from __future__ import annotations

'''

OWN_SOURCE = '''

AUTO_MAP = {{
{auto_map}
}}


def own_source() -> tuple[str, dict[str, str]]:
    """This file, and the config's auto_map: a model is saved again as it was loaded."""
    return Path(__file__).read_text(encoding="utf-8"), AUTO_MAP
'''

NAMES = ("TABLE", "ATTENTION", "PAGE")  # of declarations in `anatomies`
DECLARED = '''def declared(name: str) -> tuple[Any, ...]:
    """The declarations that this model's family is known by."""
    return {{"TABLE": ({}), "ATTENTION": ({}), "PAGE": ({}), "MIXING": ()}}[name]'''

LOADER = """

class {cls}(Portable, transformers.{cls}):
    scheme, travel = {scheme}, staticmethod(own_source)
    steps = ({steps},)
"""


def travel_of(anatomy: Anatomy, scheme: Scheme, steps: Sequence[Any]) -> Travel:
    """What writes the module for one swap: called at a save, and not before."""
    return partial(travel, type(anatomy.model), type(scheme), tuple(steps), tuple(_declared_in(anatomy)))


def _declared_in(anatomy: Anatomy) -> Iterator[tuple[str, str]]:
    """(module, name) of the declarations that this model's family is known by."""
    attentions, families = own_attention(anatomy.model).values(), {table.family for table in anatomy.tables}
    every = [held(module).keys() for module in anatomy.model.modules()] if anatomy.page else []
    for file in pkgutil.iter_modules(anatomies.__path__):
        module = f"{anatomies.__name__}.{file.name}"
        for key, value in vars(importlib.import_module(module)).items():
            of_table = is_declaration(key, "TABLE") and value.family in families
            of_attention = is_declaration(key, "ATTENTION") and value in attentions
            of_page = is_declaration(key, "PAGE") and any(names >= value.holds for names in every)
            if of_table or of_attention or of_page:
                yield module, key


def travel(
    cls: type[PreTrainedModel], scheme: type[Scheme], steps: tuple[Any, ...], declared_in: tuple[tuple[str, str], ...]
) -> tuple[str, dict[str, str]]:
    """(source of the module, the config's auto_map). PosSwapError for a model class that is not transformers' own."""
    import transformers

    from . import __version__
    from .portable import Portable

    if getattr(transformers, cls.__name__, None) is not cls:
        raise PosSwapError(
            f"{cls.__name__} is no model class of transformers, and its code cannot travel; swap the class it derives "
            "from, or save its state_dict"
        )
    heads = auto_classes(cls)
    flat = Flat(
        {
            "declared": DECLARED.format(
                *("".join(f"{key}," for _, key in declared_in if is_declaration(key, name)) for name in NAMES)
            )
        }
    )
    for root in (scheme, *steps, Portable):
        flat.take(root.__module__, root.__name__)
    for module, name in declared_in:
        flat.take(module, name)
    flat.imports |= {Target("pathlib", "Path"), Target("transformers", None)}
    body = flat.source()
    body = body.replace('PREFIX = "posswap_"', f'PREFIX = "posswap_{hashlib.sha256(body.encode()).hexdigest()[:8]}_"')
    auto_map = {auto: f"{CODE}.{head}" for auto, head in heads.items()}
    tail = OWN_SOURCE.format(auto_map="\n".join(f'    "{auto}": "{where}",' for auto, where in auto_map.items()))
    for head in dict.fromkeys(heads.values()):
        tail += LOADER.format(
            cls=head,
            scheme=scheme.__name__,
            steps=", ".join(step.__name__ for step in steps),
        )
    return HEADER.format(version=__version__, auto=next(iter(heads))) + body + tail, auto_map


def auto_classes(cls: type[PreTrainedModel]) -> dict[str, str]:
    """Name of an Auto class -> name of the model class it makes, for every head that shares the config of `cls`."""
    from transformers.models.auto import modeling_auto

    found = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        if mapping is not None and cls.config_class in mapping:
            heads = mapping[cls.config_class]
            heads = heads if isinstance(heads, (tuple, list)) else (heads,)
            found[name] = (cls if cls in heads else heads[0]).__name__
    if not found:  # a class of a text stack alone, which transformers files under the config of the whole
        for name, auto in vars(modeling_auto).items():
            mapping = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
            if mapping is not None and cls.__name__ in mapping._model_mapping.values():
                found[name] = cls.__name__
    # the saved class first, so that its Auto class is the one shown
    return dict(sorted(found.items(), key=lambda pair: (pair[1] != cls.__name__, pair[0])))


@dataclass
class Flat:
    """The statements taken so far (module, index), and what is imported from outside.

    `instead`: name -> what is written in place of the statement that binds it.
    """

    instead: dict[str, str] = field(default_factory=dict)
    taken: set[tuple[str, int]] = field(default_factory=set)
    imports: set[Target] = field(default_factory=set)
    files: dict[str, File] = field(default_factory=dict)

    def file(self, module: str) -> File:
        """A module of the package; those that it imports at the top are read before it, as Python does."""
        if module not in self.files:
            file = File(module)
            for imported in file.imported_first:
                self.file(imported)
            self.files.setdefault(module, file)
        return self.files[module]

    def take(self, module: str, name: str) -> None:
        """Take the statement that binds `name` in `module`, and everything that it mentions."""
        file = self.file(module)
        if name not in file.bound:
            target = file.names.get(name)
            if target is None:
                return  # a builtin, or a local variable
            self._follow(target)
            return
        index = file.bound[name]
        if (module, index) in self.taken:
            return
        self.taken.add((module, index))
        if name in self.instead:
            return
        for target in file.mentioned(index):
            self._follow(target)
        for other, statement in enumerate(file.tree.body):  # what runs over it at import, a loop that registers it
            if isinstance(statement, ast.For) and name in {n.id for n in ast.walk(statement.iter) if is_name(n)}:
                self.taken.add((module, other))
                for target in file.mentioned(other):
                    self._follow(target)

    def _follow(self, target: Target) -> None:
        if target.module.partition(".")[0] != PACKAGE:
            self.imports.add(target)
        elif target.name is not None:
            self.take(target.module, target.name)

    def source(self) -> str:
        """The imports, then the statements."""
        owner: dict[str, tuple[str, int]] = {}
        parts: list[str] = []
        simple = False
        for module, file in self.files.items():
            for index in sorted(index for where, index in self.taken if where == module):
                names = [n for n, i in file.bound.items() if i == index]
                for name in names:
                    if owner.setdefault(name, (module, index)) != (module, index):
                        raise RuntimeError(f"{name} is bound in {module} and in {owner[name][0]}: rename one of them")
                was_simple, simple = simple, isinstance(file.tree.body[index], (ast.Assign, ast.AnnAssign))
                parts += [
                    "\n" if simple and was_simple else "\n\n\n",
                    next((self.instead[n] for n in names if n in self.instead), None) or file.text(index),
                ]
        return self._import_lines() + "".join(parts) + "\n"

    def _import_lines(self) -> str:
        modules, named = [], defaultdict(list)
        for target in self.imports:
            renamed = f" as {target.alias}" if target.alias else ""
            if target.name is None:
                modules.append(f"import {target.module}{renamed}")
            else:
                named[target.module].append(f"{target.name}{renamed}")
        lines = [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(named.items())]
        return "\n".join(sorted(modules) + lines)


@dataclass(frozen=True)
class Target:
    """What a name stands for: `name` of `module`, or the module itself; `alias` where it is imported as another."""

    module: str
    name: str | None
    alias: str | None = None


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


@dataclass
class File:
    """One module's source, statement by statement."""

    module: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse("\n".join(self.lines))

    @cached_property
    def lines(self) -> list[str]:
        return inspect.getsource(importlib.import_module(self.module)).splitlines()

    @cached_property
    def bound(self) -> dict[str, int]:
        """Name -> index of the top-level statement that binds it; imports are not among them."""
        found = {}
        for index, statement in enumerate(self.tree.body):
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                found[statement.name] = index
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                found |= {n.id: index for target in targets for n in ast.walk(target) if is_name(n)}
        return found

    @cached_property
    def names(self) -> dict[str, Target]:
        """What the imports at the top bind, those for annotations only among them."""
        blocks = [s.body if isinstance(s, ast.If) else [s] for s in self.tree.body]
        return {name: target for block in blocks for s in block for name, target in self.imported(s)}

    @cached_property
    def imported_first(self) -> list[str]:
        """Modules of the package that are run before this one."""
        targets = [target for s in self.tree.body for _, target in self.imported(s)]
        return [t.module for t in targets if t.module.partition(".")[0] == PACKAGE and t.name is not None]

    def imported(self, statement: ast.stmt) -> Iterator[tuple[str, Target]]:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.asname or alias.name.partition(".")[0], Target(alias.name, None, alias.asname)
        elif isinstance(statement, ast.ImportFrom) and statement.module != "__future__":
            home = importlib.import_module(self.module)
            base = importlib.util.resolve_name("." * statement.level + (statement.module or ""), home.__package__)
            inside = base.partition(".")[0] == PACKAGE
            for alias in statement.names:
                value = getattr(importlib.import_module(base), alias.name) if inside else None
                target = (
                    Target(value.__name__, None)
                    if isinstance(value, ModuleType)
                    else Target(base, alias.name, alias.asname)
                )
                yield alias.asname or alias.name, target

    def _local_imports(self, index: int) -> list[ast.ImportFrom]:
        """Imports from the package inside of a statement."""
        return [n for n in ast.walk(self.tree.body[index]) if isinstance(n, ast.ImportFrom) and n.level]

    def _names_in(self, index: int) -> dict[str, Target]:
        local = {name: target for node in self._local_imports(index) for name, target in self.imported(node)}
        return self.names | local

    def mentioned(self, index: int) -> Iterator[Target]:
        """What the names in a statement stand for; of a module of the package, the attribute that is asked of it."""
        names = self._names_in(index)
        for node in ast.walk(self.tree.body[index]):
            if isinstance(node, ast.Attribute) and self._is_of_package(node.value, names):
                yield Target(names[node.value.id].module, node.attr)
            elif is_name(node) and isinstance(node.ctx, ast.Load) and not self._is_of_package(node, names):
                yield names.get(node.id, Target(self.module, node.id))

    @staticmethod
    def _is_of_package(node: ast.AST, names: dict[str, Target]) -> bool:
        target = names.get(node.id) if is_name(node) else None
        return target is not None and target.name is None and target.module.partition(".")[0] == PACKAGE

    def text(self, index: int) -> str:
        """A statement as it is written, with the comment above it, less what refers to other files of the package."""
        statement, names = self.tree.body[index], self._names_in(index)
        lines = list(self.lines)
        modules = [
            n for n in ast.walk(statement) if isinstance(n, ast.Attribute) and self._is_of_package(n.value, names)
        ]
        for node in sorted(modules, key=lambda n: (n.lineno, n.col_offset), reverse=True):
            line = lines[node.lineno - 1].encode()
            prefix = node.col_offset + len(node.value.id) + 1
            lines[node.lineno - 1] = (line[: node.col_offset] + line[prefix:]).decode()
        dropped: set[int] = set()
        for node in self._local_imports(index):
            dropped |= set(range(node.lineno - 1, node.end_lineno))
            if not lines[node.end_lineno].strip():  # the empty line behind it
                dropped.add(node.end_lineno)
        first = min([statement.lineno] + [d.lineno for d in getattr(statement, "decorator_list", [])]) - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        return "\n".join(lines[i] for i in range(first, statement.end_lineno) if i not in dropped)
