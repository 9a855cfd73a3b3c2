"""The text of policies, recipe files, and the catalogue that comes with the package."""

from __future__ import annotations

import pathlib
import tomllib

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import given

from remat_kit._errors import PolicyError, UnknownNameError
from remat_kit._policy import recipe as _recipe
from remat_kit._policy.algebra import callable_policy, offload, recompute, save
from remat_kit._policy.check import check
from remat_kit._policy.reading import as_policy
from remat_kit._policy.recipe import Recipe, dumps, load, loads, parse, recipes, resolve
from remat_kit._policy.selectors import (
    Named,
    collective,
    dots,
    dots_no_batch,
    everything,
    gathered_parameters,
    larger_than,
    module,
    named,
    named_regex,
    nothing,
    primitive,
    where,
)
from remat_kit._policy.structural import Structural, block, nested, segments, uniform
from remat_kit._program.value import Value

CHECKOUT = pathlib.Path(__file__).parents[2] / "policies"
ALL = recipes()

# -- the text of a policy ----------------------------------------------------------------------


def test_parses_what_a_user_would_write() -> None:
    assert parse(' save( named("a") )\n') == save(named("a"))
    assert parse("dots | named('x')") == save(dots | named("x"))
    assert parse("offload(dots, to='unpinned_host')") == offload(dots, to="unpinned_host")
    assert parse("uniform(2, keep=dots)") == uniform(2, keep=save(dots))
    assert parse("~dots & named('x', strict=False)") == save(~dots & named("x", strict=False))
    assert parse("first(recompute(dots), save(everything))") == recompute(dots) >> everything
    text = "callable_policy(jax.checkpoint_policies.dots_saveable)"
    assert parse(text) == callable_policy(jax.checkpoint_policies.dots_saveable)


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("save(dots", "this is not the text of a policy"),
        ("", "this is not the text of a policy"),
        ("save(\x00)", "this is not the text of a policy"),
        ("(" * 500 + "dots" + ")" * 500, "this is not the text of a policy"),
        ("__import__('os').system('true')", "system('true')\" is not allowed"),
        ("dots.matches", "'dots.matches' is not allowed"),
        ("(lambda: dots)()", "is not allowed"),
        ("[save(dots)]", "is not allowed"),
        ("save(f'{dots}')", "is not allowed"),
        ("save(named(*['a']))", "\"*['a']\" is not allowed"),
        ("~" * 900 + "dots", "too deeply nested"),
        ("save(named(**{'strict': False}))", "`**` is not allowed"),
        ("save(dots if True else dots)", "is not allowed"),
        ("save(named(b'x'))", "is not allowed"),
        ("save(dots) + save(dots)", "is not allowed"),
        ("jax.checkpoint", "'jax.checkpoint' is not allowed"),
        ("callable_policy(jax.numpy.tanh)", "'jax.numpy.tanh' is not allowed"),
        ("'dots'", "this gives 'dots', which is neither"),
        ("dots | 'x'", "\"'x'\" is neither a selector nor a policy"),
        ("named('a') - save(dots)", "cannot be built"),
        ("~save(dots)", "cannot be built"),
        ("save(dots, 3, 4)", "'save(dots, 3, 4)' cannot be built"),
        ("save(dotz=1)", "cannot be built"),
        ("save('dots')", "must be a selector"),
        ("uniform(0)", "`uniform(0)`"),
    ],
)
def test_refuses_all_else_and_shows_the_piece(text: str, piece: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(text)
    assert piece in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("svae(dots)", "did you mean 'save'"),
        ("save(dotz)", "did you mean 'dots'"),
        ("save(where(x))", "build this policy in Python"),
        ("callable_policy(jax.checkpoint_policies.dots_savable)", "did you mean 'dots_saveable'"),
        ("callable_policy(jax.checkpoint_policies.save_only_these_names)", "dots_saveable"),
    ],
)
def test_unknown_words_have_near_matches(text: str, hint: str) -> None:
    with pytest.raises(UnknownNameError, match="hint: ") as caught:
        parse(text)
    assert hint in (caught.value.hint or "")


# -- files -------------------------------------------------------------------------------------

_texts = st.text(max_size=40)
_bodies = st.sampled_from(
    [
        ("save(dots)", ()),
        ("save(named('it\\'s \"x\"')) | offload(module('*/mlp'))", ()),
        ("uniform({n}, keep=save(dots))", (("n", "int"),)),
        ("save(named_regex('a{2}', {rx}))", (("rx", "text"),)),
        ("nested({group})", (("group", "int or None"),)),
    ]
)


@given(_bodies, _texts, _texts, st.lists(_texts, max_size=2))
def test_files_round_trip(body, description: str, origin: str, aliases: list[str]) -> None:
    text, parameters = body
    recipe = Recipe("mine", text, description, origin, tuple(aliases), parameters)
    assert loads(dumps(recipe), name="mine") == recipe


@given(_texts)
def test_any_text_survives_as_a_parameter(text: str) -> None:
    recipe = Recipe("axlearn", "save(named({n}))", parameters=(("n", "text"),))
    if text:
        assert recipe.given(text).policy == save(named(text))


def test_a_policy_is_written_as_a_recipe() -> None:
    p = recompute(primitive("max")) >> (save(named("a")) | offload(larger_than("1MiB")))
    assert loads(dumps(p)).policy == p


@pytest.mark.parametrize("policy", [save(where(bool)), callable_policy(lambda *_, **__: True)])
def test_functions_have_no_place_in_a_file(policy) -> None:
    with pytest.raises((PolicyError, UnknownNameError)):
        dumps(policy)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("policy = ", "this is not TOML"),
        ("", "a recipe needs a policy"),
        ("policy = 3", "must be text"),
        ("policy = 'save(dots)'\naliases = 'x'", "aliases must be a list"),
        ("policy = 'save(dots)'\naliases = [1]", "aliases must be a list"),
        ("policy = 'save(dots)'\nparameters = 1", "must be text"),
        ("policy = 'save(dots)'\ndescripton = ''", "did you mean 'description'"),
        ("policy = 'save(dotz)'", "did you mean 'dots'"),
        ("policy = 'save(dots)'\n[parameters]\nn = 'int'", "the parameter 'n' does not occur in"),
        ("policy = 'uniform({n})'\n[parameters]\nn = 'integer'", "did you mean 'int'"),
        ("policy = 'uniform({n})'", "is not allowed"),
        ("policy = 'uniform({a})'\n[parameters]\na = 'int'\nb = 'int'", "at most one parameter"),
    ],
)
def test_files_that_are_no_recipes(text: str, said: str) -> None:
    with pytest.raises((PolicyError, UnknownNameError), match="hint: ") as caught:
        loads(text, name="mine")
    assert said in str(caught.value)


def test_loads_by_path(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(dumps(Recipe("mine", "save(dots)", "Ours.")), encoding="utf-8")
    assert load(str(path)) == Recipe("mine", "save(dots)", "Ours.")
    assert as_policy(str(path)) == save(dots)
    with pytest.raises(UnknownNameError, match="No such file"):
        load(str(tmp_path / "absent.toml"))
    path.write_bytes(b"\xff")
    with pytest.raises(UnknownNameError, match="not UTF-8"):
        load(str(path))


# -- the catalogue -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("everything", save(everything)),
        ("nothing", save(nothing)),
        ("dots", save(dots)),
        ("dots_no_batch", save(dots_no_batch)),
        ("names:a,b*", save(named("a", "b*"))),
        ("names: a, b ", save(named("a", "b"))),
        ("offload_dots", offload(dots_no_batch)),
        ("full", save(nothing)),
        ("save_out_proj", save(named("out_proj", strict=False))),
        ("uniform:2", uniform(2)),
        ("block:4", block(4)),
        ("larger_than:1MiB", recompute(larger_than("1MiB"))),
        ("larger_than:4096", recompute(larger_than(4096))),
        ("mindspore_cell", save(nothing)),
        ("mindspore_primitive:max,exp", recompute(primitive("max", "exp"))),
        ("mindspore_mp_comm_recompute", save(collective - gathered_parameters)),
        ("mindspore_parallel_optimizer_comm_recompute", save(gathered_parameters)),
        ("segments:a,b", segments("a", "b")),
        ("axlearn_save:.*(q|k)_proj{1}", save(named_regex(".*(q|k)_proj{1}"))),
        ("save_carries", save(nothing)),
        ("nested", nested()),
        ("nested:4", nested(4)),
        ("t5x_minimal", save(dots_no_batch)),
    ],
)
def test_presets(text: str, policy) -> None:
    assert resolve(text) == policy
    assert as_policy(text) == policy


QKV = {"query_proj", "key_proj", "value_proj", "qkv_proj"}
MLP = {"mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo"}


@pytest.mark.parametrize(
    ("text", "saved", "offloaded"),
    [
        ("minimal", QKV | {"out_proj"} | MLP, set()),
        ("minimal_flash", QKV | {"out_proj", "context"} | MLP, set()),
        ("minimal_with_context", QKV | {"out_proj", "context"} | MLP, set()),
        ("save_dot_with_context_except_mlp", QKV | {"out_proj", "context"}, set()),
        ("save_dot_except_mlpwi", QKV | {"out_proj", "mlpwo"}, set()),
        ("save_dot_except_mlp", QKV | {"out_proj"}, set()),
        ("save_qkv_proj", QKV, set()),
        ("save_out_proj", {"out_proj"}, set()),
        ("full", set(), set()),
        ("minimal_offloaded", set(), QKV | {"out_proj"} | MLP),
        ("qkv_proj_offloaded", set(), {"query_proj", "key_proj", "value_proj"}),
    ],
)
def test_maxtext_presets_decide_as_maxtext_does(text, saved, offloaded) -> None:
    policy = resolve(text)
    decided = {
        n: policy.decide(Value(names=(n,))).name for n in QKV | MLP | {"out_proj", "context"}
    }
    assert {n for n, d in decided.items() if d == "SAVE"} == saved
    assert {n for n, d in decided.items() if d == "OFFLOAD"} == offloaded


def test_pax_presets_keep_what_they_are_called_after() -> None:
    ffn = {n: Value(names=(n,)) for n in ("ffn1", "ffn2", "logits", "context", "out_proj")}

    def kept(preset: str) -> set[str]:
        policy = resolve(preset)
        return {n for n, v in ffn.items() if policy.decide(v).name == "SAVE"}

    assert kept("save_dot_except_logits") == {"ffn1", "ffn2", "context", "out_proj"}
    assert kept("save_dot_except_logits_ffn1") == {"ffn2", "context", "out_proj"}
    assert kept("save_qkv_out_proj") == {"out_proj"}
    assert kept("save_dot_for_mlperf_200b") == {"context", "out_proj"}


def test_megatron_selective_recomputes_the_core_of_attention_alone() -> None:
    policy = resolve("selective")

    def dot(module: str, batch: tuple[int, ...]) -> Value:
        params = {"dimension_numbers": (((2,), (0,)), (batch, batch))}
        return Value(primitives=("dot_general",), module=module, params=params)

    recomputed = [
        dot("GPT/block_0/attn", (0, 1)),
        Value(primitives=("exp",), module="GPT/block_0/attn"),
        Value(primitives=("exp",), module="Net/MultiHeadDotProductAttention_0"),
        Value(primitives=("select_n",), module="GPT/block_0/self_attention/Dropout_0"),
    ]
    kept = [
        dot("GPT/block_0/attn/qkv", ()),
        dot("GPT/block_0/mlp/up", ()),
        Value(primitives=("mul",), module="T5/pre_attention_layer_norm"),
        Value(primitives=("tanh",), module="GPT/block_0/mlp"),
        Value(primitives=("add",), module=""),
    ]
    assert {policy.decide(v).name for v in recomputed} == {"RECOMPUTE"}
    assert {policy.decide(v).name for v in kept} == {"SAVE"}


@pytest.mark.parametrize("recipe", ALL, ids=lambda r: r.name)
def test_every_recipe_is_whole(recipe: Recipe) -> None:
    assert recipe.description.endswith(".")
    assert "https://" in recipe.origin
    text = (CHECKOUT / f"{recipe.name}.toml").read_text(encoding="utf-8")
    assert text == dumps(recipe)
    assert tomllib.loads(text)["policy"] == recipe.text


@pytest.mark.parametrize("recipe", ALL, ids=lambda r: r.name)
def test_every_recipe_serves_models_that_lack_its_names(recipe: Recipe) -> None:
    if not recipe.parameters or recipe.parameters[0][1] == "int or None":
        check(recipe.policy, [Value(primitives=("dot_general",), module="Net")])


@pytest.mark.parametrize("recipe", ALL, ids=lambda r: r.name)
def test_every_recipe_by_names_is_a_plain_jax_policy(recipe: Recipe) -> None:
    if recipe.parameters:
        return
    policy = recipe.policy
    if isinstance(policy, Structural) or not all(s.plain for s in policy.leaves()):
        with pytest.raises(PolicyError, match="needs more"):
            policy(jax.lax.tanh_p)
        return
    x = jax.numpy.ones((4, 4))
    grad = jax.grad(jax.checkpoint(lambda x: jax.numpy.tanh(x @ x).sum(), policy=policy))
    assert jax.numpy.isfinite(jax.jit(grad)(x)).all()


def test_names_and_aliases_are_claimed_once() -> None:
    claimed = [name for r in ALL for name in (r.name, *r.aliases)]
    assert sorted(claimed) == sorted(set(claimed))
    assert all(name.isidentifier() for name in claimed)


def test_aliases_lead_to_their_recipe() -> None:
    for recipe in ALL:
        for alias in recipe.aliases:
            assert load(alias) == recipe


def test_recipes_with_regular_expressions_keep_what_axlearn_keeps() -> None:
    policy = resolve("axlearn_native_attention")
    assert all(isinstance(s, Named) for s in policy.leaves())
    kept = policy.decide(Value(names=("MultiheadAttention.q_proj",)))
    assert kept.name == "SAVE"
    assert policy.decide(Value(names=("FeedForward.linear1_0",))).name == "RECOMPUTE"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("minimial", "did you mean 'minimal'"),
        ("unifrm:2", "did you mean 'uniform'"),
        ("uniform", "uniform:<n>, for example uniform:2"),
        ("names", "names:<names>, for example names:a,b"),
        ("dots:3", "takes no parameter"),
        ("uniform:x", "not of the type 'int'"),
        ("uniform:0", "`uniform(0)`"),
        ("names:a,,b", "not of the type 'names'"),
        ("larger_than:big", "not of the type 'size'"),
        ("axlearn_save:(", "not a regular expression"),
        ("absent/mine.toml", "cannot be read"),
    ],
)
def test_presets_that_do_not_exist(text: str, said: str) -> None:
    with pytest.raises((PolicyError, UnknownNameError), match="hint: ") as caught:
        resolve(text)
    assert said in str(caught.value)


def test_the_catalogue_is_up_to_date() -> None:
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    assert _recipe.with_catalogue(readme) == readme, (
        'run: python -c "from remat_kit._policy import recipe; recipe.write_catalogue()"'
    )
    for recipe in ALL:
        assert f"| `{recipe.usage}` |" in readme


def test_the_modules_of_the_example_in_the_readme() -> None:
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    blocks = [b.partition("```")[0] for b in readme.split("```toml\n")[1:]]
    assert loads(blocks[0]).policy == save(named("attn_out")) | offload(module("*/mlp"))
    inner = "\n".join(line.strip() for line in blocks[1].splitlines())
    assert loads(inner).given("2").policy == uniform(2, keep=dots)
