"""A tool: a calculator, which the model may call before it answers. GRPO on GSM8K with it:

torchrun --nproc-per-node 8 examples/grpo_gsm8k.py --model DIR \\
    rollout.environment.function_tool_path=examples/calculator.py
"""

import ast
import operator

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_LARGEST = 1e30
_LARGEST_EXPONENT = 100
_MOST_CHARACTERS = 500


def calculate(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **, such as 3 * (4 + 5).
    """
    if len(expression) > _MOST_CHARACTERS:
        return f"Error: an expression has at most {_MOST_CHARACTERS} characters"
    try:
        return f"{_value(ast.parse(expression.replace(',', ''), mode='eval').body):.15g}"
    except (SyntaxError, ValueError, ArithmeticError) as error:
        # the model's mistake, no failure of the tool
        return f"Error: {error}"


def _value(node: ast.expr) -> float:
    """Return the value of a part of an expression."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left = _value(node.left)
        right = _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > _LARGEST_EXPONENT:
            raise ValueError(f"an exponent is at most {_LARGEST_EXPONENT}")
        value = _OPERATIONS[type(node.op)](left, right)
    else:
        raise ValueError(f"{ast.unparse(node)} is no arithmetic")
    if isinstance(value, complex) or abs(value) > _LARGEST:
        raise ValueError("the value is too large, or not real")
    return value
