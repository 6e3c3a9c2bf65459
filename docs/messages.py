"""A directive that lists every message of the library, as its source has them."""

import ast
import re
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

import numpyro_ebm

ROOT = Path(numpyro_ebm.__file__).parent


def text(node, names):
    """A message's text, with `…` for what is filled in; None where it isn't in the source."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text(value, names) or "…" for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (text(left, names) or "…") + (text(right, names) or "…")
        case ast.IfExp(body=body, orelse=orelse):
            both = [text(body, names), text(orelse, names)]
            return " / ".join(found for found in both if found) or None
        case ast.Name(id=name) if name in names:
            return text(names[name], {})
    return None


def messages(path):
    """Pairs (error, message) of a module, in the order of its source."""
    found = []
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            match node:
                case ast.Raise(exc=ast.Call(func=ast.Name(id=error), args=[message, *_])):
                    pass
                case ast.Call(func=ast.Attribute(attr="warn"), args=[message, *_]):
                    error = "UserWarning"
                case _:
                    continue
            written = text(message, names)
            if written and (error, written) not in found:
                found.append((error, written))
    return found


class Messages(Directive):
    def run(self):
        areas: dict[str, list] = {}
        for path in sorted(ROOT.rglob("*.py")):
            area = path.relative_to(ROOT).parts[0].removesuffix(".py")
            areas.setdefault(area, []).extend(messages(path))
        sections = []
        for area, found in areas.items():
            if not found:
                continue
            section = nodes.section(ids=[f"messages-{area}"], names=[])
            section += nodes.title(text=area)
            items = nodes.bullet_list()
            for error, message in found:
                line = nodes.paragraph()
                line += nodes.Text(f"{error}: ")
                line += nodes.literal(text=re.sub(r"\s+", " ", message))
                items += nodes.list_item("", line)
            section += items
            sections.append(section)
        return sections


def setup(app):
    app.add_directive("messages", Messages)
    return {"parallel_read_safe": True}
