"""Shell scripts as data: each construct as bash evaluates it, what cannot be known, and hostile
text."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from verl_input import shell_parser
from verl_input.shell_script import read_script
from verl_input.shell_words import Word

from rlhf_mc.config.errors import UserError

KNOWN = {
    "quotes": "run a'b c'\"d e\"f\\ g \"\\$x \\\"\" $'t\\tn' '' \"\"",
    "continued lines and comments": "run a \\\n  b # c\n",
    "comments that a backslash ends": "#\nrun a \\\n # b \\\n rollout.n=4\nrun d # e \\\nrun f\n"
                                      "a=(\n x # y \\\n # z \\\n w\n)\nrun ${a[@]}",
    "the characters that separate words":
        'a=(x y z); f=$(IFS=,; echo "${a[*]}" ${a[*]}); run "$f" "${a[*]}"; b=" p:q:: r s:"; run '
        '$b\n'
        'IFS=:; run "${a[*]}" "${a[@]}" $b y$b; c=${a[*]}; d=$b; run "$c" $d; set -- 1 2; run "$*" '
        '$*\n'
        'IFS=" :"; run $b; IFS=; run "${a[*]}" $b; unset IFS; run "${a[*]}" $b',
    "a function's local variables":
        'j() { local IFS="$1"; shift; echo "$*"; }; run "$(j , a b)"; x=1; g() { local x=2 y; y=3; '
        'z=4; run $x; }\n'
        'n=7; m() { local n; run "${n:-none}"; n=4; declare m=5 x=$x$n; run $x; typeset -g o=6; }; '
        'm\n'
        'run $n "${m:-none}" $o\n'
        'k() { local IFS=-; w="$*"; }; k 1 2; g; run $w "$x" "${y:-none}" $z',
    "a here-document": "cat > x.py <<'EOF'\nrun no \"$(\nEOF\nrun yes\n",
    "a here-document whose delimiter is expanded": "x=1\ncat <<EOF\n$x ${y} run no\nEOF\nrun yes\n",
    "defaults": ("b=1; run ${a:-x} ${b:-x} \"${a:-y z}\" ${c:-${d:-\"${b}/e\"}} ${a-f} ${b:+g} "
                "${a:+h} ${e:=i} $e"),
    "defaults of an empty variable": "a=; run x${a:-b} x${a-c} x${a:+d} x${a+e}",
    "defaults with brackets and sums": "run ${a:-[1]} ${b:-$(((2 + 3) * 4))} ${c:-\"['x','y']\"}",
    "arrays": "a=(x 'y z' # comment\n)\na+=(w)\na[1]=v\nrun \"${a[@]}\" ${#a[@]} ${a[0]}\n"
              "run \"${a[*]}\" ${a[@]:1} $a ${a[-1]}",
    "empty arrays": 'a=()\nrun "${a[@]}" "$@" x "${a[*]}"',
    "an associative array": "declare -A a=([k]=v)\na[l]=w\nrun ${a[k]} ${a[l]}",
    "operators of variables": "a=/x/y.tar.gz; run ${a##*/} ${a%.*} ${a%%.*}\n"
                              "run ${a#*/} ${#a} ${a/x/z} ${a//./_} ${a:1:3} ${a^^}",
    "an indirect variable": "a=b; b=c; run ${!a}",
    "appended text": "a=x; a+=y; export a+=z; run $a",
    "words of a variable": 'a="b  c"; run $a "$a" x$a',
    "sums": "a=010; run $((a + 1)) $((-017)) $((0))\n"
            "a=7; run $((a / 2)) $((a % -4)) $((-a / 2)) $((a > 3 ? 1 : 2)) $((2 ** 5)) $(( a += 1 "
            ")) $((a++)) $a",
    "substituted commands": "run $(basename /x/y.sh .sh) $(dirname /x/y/z) `echo a  b`\n"
                            "run $(cd /usr/.. && pwd) \"$(echo c; echo d)\"",
    "a condition": ('a=b; if [ "$a" = b ] && [[ $a == b* ]]; then run 1; elif true; then run 2; '
                   'else run 3; fi'),
    "numbers in a condition": ("a=3; if [ $a -gt 4 ]; then run 1; elif [[ $a -le 3 && ! $a -eq 2 "
                              "]]; then run 2; fi"),
    "a variable that is not set": 'if [ -z "$a" ]; then run 1; fi; [ -n "${b:-}" ] && run 2\n'
                              '[[ -z $c ]] || run 3; run 4',
    "a condition of two parts": ('a=x; [ -n "$a" -a "$a" = x ] && run 1; [ "$a" = y -o ! -z "$a" ] '
                                '&& run 2'),
    "cases": "a=qwen-7b; case $a in *8b) run 1;; *7b | x) run 2;; *) run 3;; esac",
    "loops": ("for i in 1 2 3; do [ $i = 2 ] && continue; run $i; done; for ((j = 0; j < 2; j++)); "
             "do run j$j; done"),
    "a loop over arguments": ('set -- --x 1 --y 2; while [ $# -gt 0 ]; do run $1 "$2"; shift 2; '
                             'done'),
    "a loop that ends": ("i=0; while true; do i=$((i + 1)); if [ $i -ge 3 ]; then break; fi; done; "
                        "run $i"),
    "functions": ('f() { local a=$1; shift; run "$a" "$@"; }; f x y z; function g { return 1; run '
                 'no; }; g; run yes'),
    "a function that prints": "f() { echo $1-b; }; run $(f a)",
    "a subshell and a group": "a=1; (a=2; run $a); { a=3; }; run $a",
    "statements after exit": "run 1; if true; then exit 0; fi; run 2",
    "set, redirections and pipes": ("set -euxo pipefail\nrun a 2>&1 >log | tee log &\nwait\nX=1 "
                                    "run "
                                   "b < /dev/null"),
    "an unset variable": "a=1; unset a; run ${a:-b}",
    "the home directory": "a=~/x; run $a $HOME/y",
}  # fmt: skip
"""Scripts whose commands `run ...` are known without running anything."""


def words_of(script: str, **environment: str) -> list[list[Word]]:
    """Return the words of each command `run`."""
    found = read_script(script, "run.sh", {"HOME": "/home/me", **environment})
    return [words[1:] for words in found.commands if words[0].text == "run"]


@pytest.mark.parametrize("name", KNOWN)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    """Compare with bash, in which `run` prints its words."""
    ours = words_of(KNOWN[name])
    assert [word.problem for words in ours for word in words if word.problem] == []
    run = "run() { printf '%s\\0' \"$@\" $'\\n' >> \"$OUT\"; }\n"
    out = tmp_path / "out"
    environment = {"HOME": "/home/me", "OUT": str(out), "PATH": "/usr/bin:/bin"}
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run(
        [bash, "-c", run + KNOWN[name]],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    expected = [text.split("\0")[:-1] for text in out.read_text().split("\n\0")[:-1]]
    assert expected and [[word.text for word in words] for words in ours] == expected


@pytest.mark.parametrize(
    ("script", "text", "problem", "variable"),
    [
        ("run a=$X", "a=X", "$X is not set", "X"),
        ("run $1", "1", "$1 is not set", "1"),
        ("run x_$(date +%s)", "x_date", "$(date +%s) is not evaluated", None),
        ("D=$(date +%s)\nrun $D", "date", "$(date +%s) is not evaluated", "D"),
        ('A="$X/a"; B=($A)\nrun "${B[@]}"', "X/a", "$X is not set", "X"),
        ("run $((X * 2))", "X", "$X is not set", "X"),
        ("run $((08))", "value", "$((08)) is not evaluated", None),
        ("run a={x,y}", "a={x,y}", "{x,y} is not expanded", None),
        ("run {1..3}=\\{x,y\\}", "{1..3}={x,y}", "{1..3} is not expanded", None),
        ("run $((1 / 0))", "value", "$((1 / 0)) is not evaluated", None),
        ("A=$(nvidia-smi -L | wc -l)\nrun $A", "nvidia", ("$(nvidia-smi -L | wc -l) is not "
                                                         "evaluated"), "A"),
        ("if [ -f x ]; then A=1; else A=2; fi\nrun $A", "A",
         "$A is '1' or '2', by the condition `[ -f x ]` in line 1, which is not decided", "A"),
        ('A=0\n[ "$MODE" = x ] && A=1\nrun $A', "A",
         "$A is '1' or '0', by the condition `[ \"$MODE\" = x ]` in line 2, which is not decided",
         "MODE"),
        ("A=0; case $MODE in 7) A=1;; b) A=2;; esac\nrun $A", "A",
         "$A is '1' or '2' or '0', by the condition `$MODE` in line 1, which is not decided",
         "MODE"),
        ("while ping; do A=1; done\nrun $A", "A",
         "$A is '1' or not set, by the condition `ping` in line 1, which is not decided", "A"),
        ("read A\nrun $A", "A", "$A is read in line 1", "A"),
    ],
)  # fmt: skip
def test_what_cannot_be_known_is_named(
    script: str, text: str, problem: str, variable: str | None
) -> None:
    ((word,),) = words_of(script)
    assert (word.text, word.problem, word.variable) == (text, problem, variable)
    if variable is not None:  # the way out
        ((given,),) = words_of(script, **{variable: "7"})
        assert given.problem is None and given.text != text


def test_branches_that_agree_or_end_the_script_leave_no_doubt() -> None:
    ((word,),) = words_of(
        "if [ -f x ]; then A=1; else A=1; fi\n[ -d y ] || exit 1\nA=${A}2\nrun $A"
    )
    assert (word.text, word.problem) == ("12", None)
    script = read_script(
        'if [ -z "$MODEL" ]; then\n echo usage\n exit 1\nfi\nrun $MODEL', "run.sh", {}
    )
    assert script.ended == "the script ends in line 3; it asks for --env MODEL=VALUE"
    assert words_of('[ -n "$MODEL" ] || exit 1; run $MODEL', MODEL="m")[0][0].text == "m"


@pytest.mark.parametrize(
    ("condition", "name"),
    [
        ('[ -z "$X" ]', "X"),
        ('[ -z "${X:-}" ]', "X"),
        ("Y=${X:-}; [[ -z $Y ]]", "X"),
        ('Y="${1:-}"; [ ! -n "$Y" ]', "1"),
        ("[ $# -lt 1 ]", "1"),
    ],
)
def test_variable_that_a_script_asks_for_is_named(condition: str, name: str) -> None:
    text = f'{condition} && exit 1\nrun ${{X:-$1}} "$@"'
    assert f"it asks for --env {name}=VALUE" in read_script(text, "run.sh", {}).ended
    given = read_script(text, "run.sh", {name: "m"})
    assert [word.text for word in given.commands[0]][:2] == ["run", "m"] and given.environment == {
        name: "m"
    }


def test_environment_that_is_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "not taken")
    script = read_script("run $A ${B:-$PWD} ${OTHER:-x}", "run.sh", {"A": "1", "B": "2", "C": "3"})
    assert [word.text for word in script.commands[0]] == ["run", "1", "2", "x"]
    assert script.environment == {"A": "1", "B": "2"}
    assert (
        read_script("python3 -c 'import torch_npu' && run npu || run gpu", "run.sh", {})
        .commands[0][1]
        .text
        == "gpu"
    )


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("run a={" + "{" * 5000, "line 1: nested too deeply"),
        ("\nrun a=$((" + "(" * 5000, "line 2: nested too deeply"),
        ("run a=" + "${a:-" * 2000, "line 1: nested too deeply"),
        ("if true; then " * 400 + "run;" + "fi;" * 400, "line 1: nested too deeply"),
        ("f() { f; }\nf", "run.sh: nested too deeply"),
        (
            "x=ab\n" + "x=$x$x\n" * 60,
            "line 20: the values of the script's variables grow beyond 4 MiB",
        ),
        ("A=(a b)\n" + 'A+=("${A[@]}")\n' * 60, "grow beyond 4 MiB"),
        ("while true; do x=1; done", "line 1: the values"),
        ("x=" + "a" * 9000 + "\ny=${x##*a*a*ab}\nrun $y", "line 2: the values"),
        ("run $((", "line 1: "),
        ("run 'x", "line 1: reached EOF without closing quote `'`"),
        ("#" * 40000, "line 1: a script of more than 32 KiB"),
    ],
)
def test_hostile_script_is_one_line(script: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_script(script, "run.sh", {})
    assert (
        message in str(caught.value)
        and "\n" not in str(caught.value)
        and len(str(caught.value)) < 300
    )


def test_parser_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shell_parser.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="pip install shfmt-py"):
        read_script("run", "run.sh", {})
