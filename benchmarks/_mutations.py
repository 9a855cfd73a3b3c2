"""Forty places in which `mutations.py` breaks the library."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One fault, brought into the library.

    Attributes:
        name: a short name, for the command line and the report.
        fault: what a user would see.
        file: below the root of the repository.
        old: a text that is there exactly once.
        new: what is put in its place.
        tests: the arguments of `pytest` that name the tests which should notice.
    """

    name: str
    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    # -- the algebra of policies
    Mutation(
        "stronger",
        "`a | b` takes the weaker decision.",
        "remat_kit/_policy/algebra.py",
        "return max(leaves, key=lambda leaf: (leaf._verdict(value), leaf.matches(value)))",
        "return min(leaves, key=lambda leaf: (leaf._verdict(value), leaf.matches(value)))",
        ("tests/policy/test_algebra.py::test_policies_are_a_distributive_lattice",),
    ),
    Mutation(
        "weaker",
        "`a & b` takes the stronger decision.",
        "remat_kit/_policy/algebra.py",
        "return min(leaves, key=lambda leaf: (leaf._verdict(value), not leaf.matches(value)))",
        "return max(leaves, key=lambda leaf: (leaf._verdict(value), not leaf.matches(value)))",
        ("tests/policy/test_algebra.py::test_policies_are_a_distributive_lattice",),
    ),
    Mutation(
        "first",
        "`a >> b` lets the last that matches decide.",
        "remat_kit/_policy/algebra.py",
        "part = next((p for p in self.parts if p.matches(value)), self.parts[-1])",
        "part = next((p for p in self.parts[::-1] if p.matches(value)), self.parts[-1])",
        ("tests/policy/test_algebra.py::test_the_first_that_matches_decides",),
    ),
    Mutation(
        "complement",
        "`~a` selects what `a` selects.",
        "remat_kit/_policy/algebra.py",
        "return not self.part.matches(value)",
        "return self.part.matches(value)",
        ("tests/policy/test_algebra.py::test_selectors_are_a_boolean_algebra",),
    ),
    # -- regions
    Mutation(
        "offload_stays",
        "What is to wait on the host stays on the device.",
        "remat_kit/_apply/labels.py",
        'return _jax.offloadable("device", destination)',
        "return _jax.SAVEABLE",
        ("tests/apply/test_region.py::test_offload_goes_to_the_host",),
    ),
    Mutation(
        "saves_other_names",
        "Every checkpoint name of the user is saved, whatever the policy says.",
        "remat_kit/_apply/labels.py",
        "    if read is None:\n        return _jax.RECOMPUTE",
        "    if read is None:\n        return _jax.SAVEABLE",
        ("tests/apply/test_region.py::test_the_jax_policy_asks_for_labelled_names_only",),
    ),
    Mutation(
        "one_path",
        "Equal blocks share one decision although the policy tells them apart by module.",
        "remat_kit/_apply/region.py",
        "return any(isinstance(leaf, kinds) for leaf in policy.leaves())",
        "return False",
        ("tests/contract/test_counterexamples.py::test_blocks_are_told_apart_by_their_module",),
    ),
    Mutation(
        "one_constant",
        "Equal blocks share the first one's Python constant: wrong values.",
        "remat_kit/_program/structure.py",
        "return str(x.aval), repr(x.val) if value.dtype.hasobject else value.tobytes()",
        "return str(x.aval), True",
        ("tests/contract/test_counterexamples.py::test_blocks_that_differ_in_a_constant",),
    ),
    Mutation(
        "no_barrier",
        "The compiler undoes the recompute, since nothing keeps it from merging the two.",
        "remat_kit/_apply/blocks.py",
        "        cse = not self.loop if self.prevent_cse is None else self.prevent_cse\n",
        "        cse = False\n",
        ("tests/apply/test_decorate.py::test_prevent_cse_is_chosen",),
    ),
    # -- scans that are run again in another way
    Mutation(
        "reversed_scan",
        "The stacked outputs of a reversed scan come in the wrong order.",
        "remat_kit/_apply/scans.py",
        "        ys = [jnp.flip(y, 0) for y in ys]\n",
        "        pass\n",
        ("tests/apply/test_blocks.py::test_reversed_scans",),
    ),
    Mutation(
        "block_of_a_scan",
        "`block(n)` puts every iteration of a scan into a region.",
        "remat_kit/_apply/blocks.py",
        "first = min(max(structure.n - self.blocks, 0), length)",
        "first = length",
        (
            "tests/contract/test_counterexamples.py::test_regions_for_the_first_iterations_of_a_scan",
        ),
    ),
    Mutation(
        "joined_backwards",
        "The outputs of a scan that is run in two loops are joined in the wrong order.",
        "remat_kit/_apply/scans.py",
        "y[0] if len(y) == 1 else jnp.concatenate(y) for y",
        "y[0] if len(y) == 1 else jnp.concatenate(y[::-1]) for y",
        ("tests/contract/test_counterexamples.py::test_stacked_outputs_of_a_scan_in_two_loops",),
    ),
    # -- what a plan puts in the place of an operation
    Mutation(
        "ties_in_a_pool",
        "Where a window has two equal maxima the wrong one gets the gradient.",
        "remat_kit/_backend/rewrites.py",
        "stays = select.bind(best, other)",
        "stays = ~select.bind(other, best)",
        ("tests/backend/test_rewrites.py::test_lean_pooling_changes_no_derivative",),
    ),
    Mutation(
        "relu_at_zero",
        "The derivative of `jax.nn.relu` at zero is 1 in a plan.",
        "remat_kit/_backend/rewrites.py",
        "jax.lax.select(out > 0, dx, jax.lax.full_like(dx, 0))",
        "jax.lax.select(out >= 0, dx, jax.lax.full_like(dx, 0))",
        ("tests/backend/test_rewrites.py::test_a_lean_relu_has_the_same_derivative",),
    ),
    # -- the planner
    Mutation(
        "closure",
        "A recompute is priced as if it went on behind what is kept.",
        "remat_kit/_planner/costs/simulate.py",
        "        if t in seen or t in available:\n",
        "        if t in seen:\n",
        ("tests/planner/costs/test_simulate.py::test_a_saved_tensor_stops_the_recompute",),
    ),
    Mutation(
        "minimum_cut",
        "The minimum cut takes recomputation for twice as dear as it is.",
        "remat_kit/_planner/schedules/mincut.py",
        "costs[len(keeping) : len(keeping) + len(self.work)] = self.work",
        "costs[len(keeping) : len(keeping) + len(self.work)] = 2 * self.work",
        ("tests/planner/schedules/test_mincut.py::test_minimum_cut_equals_brute_force",),
    ),
    # -- reports
    Mutation(
        "iterations",
        "What a loop computes twice is counted once instead of once for each iteration.",
        "remat_kit/_inspect/recomputed.py",
        "count = round(sum(op.times for op in ops))",
        "count = len(ops)",
        ("tests/inspect/test_recomputed.py::test_a_loop_counts_each_iteration",),
    ),
    Mutation(
        "damaged_answer",
        "A damaged entry of the cache is taken for the compiler's answer.",
        "remat_kit/_chip/cache.py",
        " or hashlib.sha256(body).digest() != digest",
        "",
        ("tests/chip/test_cache.py::test_damaged_answer_counts_as_absent_and_is_replaced",),
    ),
    Mutation(
        "loose_check",
        "`assert_equivalent` passes differences a thousand times as large as it says.",
        "remat_kit/testing/equivalence.py",
        "wrong = apart > passes",
        "wrong = apart > 1000 * passes",
        (
            "tests/testing/test_equivalence.py::test_the_tolerance_is_in_units_of_the_largest_element",
        ),
    ),
    # -- derivatives
    Mutation(
        "static_argument",
        "Equal blocks share the first one's static arguments, and so its derivative.",
        "remat_kit/_program/structure.py",
        "return _Itself(rule), tuple(map(_bound, around))",
        "return _Itself(rule), ()",
        ("tests/contract/test_counterexamples.py::test_blocks_that_differ_in_a_static_argument",),
    ),
    Mutation(
        "zero_cotangents",
        "A backward rule is called for an output that nobody uses, and makes NaN of its zeros.",
        "remat_kit/_jax.py",
        "jaxpr, _ = partial_eval.dce_jaxpr(self.linear.jaxpr, self.given, True)",
        "jaxpr = self.linear.jaxpr",
        (
            "tests/contract/test_counterexamples.py::test_an_output_whose_cotangent_is_zero_is_not_asked_for_it",
        ),
    ),
    Mutation(
        "always_differentiated",
        "A call that nobody differentiates fails where the program has no derivative.",
        "remat_kit/_apply/region.py",
        "    except Exception:\n        # The program has no derivative.",
        "    except ZeroDivisionError:\n        # The program has no derivative.",
        (
            "tests/contract/test_counterexamples.py::test_no_derivative_is_needed_where_none_is_taken",
        ),
    ),
    Mutation(
        "complex_names",
        "A complex value that is kept makes the compiler fail.",
        "remat_kit/_jax.py",
        "if dtype is None or not jnp.issubdtype(dtype, jnp.complexfloating):",
        "if True:",
        ("tests/contract/test_counterexamples.py::test_complex_residuals",),
    ),
    Mutation(
        "parameter_named_prim",
        "A primitive that has a parameter named `prim` breaks every policy.",
        "remat_kit/_apply/labels.py",
        "def keep_labelled(prim: Any, /, *avals: Any, **params: Any) -> Any:",
        "def keep_labelled(prim: Any, *avals: Any, **params: Any) -> Any:",
        (
            "tests/contract/test_counterexamples.py::test_a_primitive_may_have_a_parameter_of_any_name",
        ),
    ),
    # -- loops
    Mutation(
        "merged_in_a_loop",
        "The compiler undoes every region of a gradient that is taken inside a loop.",
        "remat_kit/_jax.py",
        "        if file.endswith(_MERGING_FILES):\n            return False\n",
        "",
        (
            "tests/contract/test_counterexamples.py::test_a_gradient_inside_a_loop_keeps_its_barrier",
        ),
    ),
    Mutation(
        "barrier_in_a_loop",
        "A loop that is differentiated pays for barriers that it does not need.",
        "remat_kit/_jax.py",
        "        if file.endswith(_LOOPS_FILE):\n            return True\n",
        "        if file.endswith(_LOOPS_FILE):\n            return False\n",
        (
            "tests/contract/test_counterexamples.py::test_a_loop_that_is_differentiated_needs_no_barrier",
        ),
    ),
    Mutation(
        "empty_scan",
        "`nested()` and `block(n)` fail on a scan of no iterations.",
        "remat_kit/_apply/blocks.py",
        "        if length == 0:  # nothing to group\n",
        "        if False:\n",
        ("tests/contract/test_counterexamples.py::test_a_scan_of_no_iterations",),
    ),
    # -- figures
    Mutation(
        "sharded_arguments",
        "A loss with arguments that are split over devices is planned as if one device had them.",
        "remat_kit/_planner/costs/build.py",
        "    if devices == 1:\n        return None\n",
        "    if devices >= 1:\n        return None\n",
        ("tests/planner/costs/test_build.py::test_a_partitioned_loss_has_the_costs_of_one_device",),
    ),
    Mutation(
        "sharded_function",
        "A function that partitions its own values is planned as if it ran on one device.",
        "remat_kit/_program/steps/gradient.py",
        "if (devices := _jax.devices_within(closed, shardings=not shardings)) > 1:",
        "if (devices := 1) > 1:",
        (
            "tests/contract/test_figures_are_of_the_users_program.py::test_meshes_of_this_process_are_planned_for_one_device_or_refused",
        ),
    ),
    Mutation(
        "lost_updates",
        "An NNX step is measured without its update of the parameters.",
        "remat_kit/_program/steps/traced.py",
        "    if _flax.holds_state(args):\n",
        "    if False:\n",
        (
            "tests/contract/test_figures_are_of_the_users_program.py::test_steps_of_nnx_keep_their_mutations",
        ),
    ),
    Mutation(
        "lost_donation",
        "The donation of a jitted step is not seen.",
        "remat_kit/_jax.py",
        "return isinstance(fn, _JITTED)",
        "return False",
        ("tests/contract/test_figures_are_of_the_users_program.py::test_jitted_steps",),
    ),
    Mutation(
        "cheapest_branch",
        "A conditional costs its cheapest branch in reports and plans.",
        "remat_kit/_program/ops.py",
        'return max(costs) if name == "cond" else sum(costs)',
        'return min(costs) if name == "cond" else sum(costs)',
        (
            "tests/compiled/test_conditionals.py"
            "::test_a_conditional_costs_its_most_expensive_branch_in_every_figure",
        ),
    ),
    Mutation(
        "first_branch_alone",
        "Of the branches of a compiled conditional only the first is read back.",
        "remat_kit/_compiled/hlo.py",
        r'''_REFERENCED = r"=(%[\w.\-]+|\{ *%[^{}]*\})"''',
        r'''_REFERENCED = r"=\{? *(%[\w.\-]+)"''',
        (
            "tests/compiled/test_conditionals.py::test_every_computation_that_an_instruction_refers_to_is_found",
        ),
    ),
    # -- modules
    Mutation(
        "state_of_nnx",
        "Random streams, metrics and variables of NNX lose what a decorated function changes.",
        "remat_kit/_frameworks/flax.py",
        'kinds = _nnx_types("Pytree", "Module", "Variable")',
        'kinds = _nnx_types("Module")',
        ("tests/apply/test_decorate.py::test_state_of_nnx",),
    ),
    Mutation(
        "other_attributes",
        "An attribute that a decorated NNX module sets is not seen on the original.",
        "remat_kit/_frameworks/classes.py",
        'object.__setattr__(twin, "__dict__", vars(x))',
        'object.__setattr__(twin, "__dict__", dict(vars(x)))',
        ("tests/apply/test_decorate.py::test_nnx_instance_shares_its_attributes",),
    ),
    Mutation(
        "mutable_switches_off",
        "`apply(..., mutable=True)` switches a policy off.",
        "remat_kit/_frameworks/flax.py",
        'initializing = any(scope.get_flag("initializing", False) for scope in scopes)',
        'initializing = any(scope.is_mutable_collection("params") for scope in scopes)',
        (
            "tests/frameworks/test_arguments.py::test_a_linen_module_that_may_change_everything_keeps_its_policy",
        ),
    ),
    Mutation(
        "drawn_again",
        "A second trace of a Linen module draws other random numbers.",
        "remat_kit/_frameworks/flax.py",
        "                _restore(one.rng_counters, before)\n            out",
        "                pass\n            out",
        ("tests/frameworks/test_arguments.py::test_a_second_trace_draws_the_same_random_numbers",),
    ),
    Mutation(
        "lost_leaves",
        "A decorated pytree, an Equinox layer for example, has no parameters any more.",
        "remat_kit/_frameworks/classes.py",
        "return callable(x) and not isinstance(x, type) and not jax.tree_util.all_leaves([x])",
        "return False",
        ("tests/frameworks/test_classes.py::test_a_callable_pytree_keeps_its_leaves_and_its_type",),
    ),
    # -- policies without an effect
    Mutation(
        "policy_on_a_step",
        "A policy on a training step does not reach its losses.",
        "remat_kit/_apply/steps.py",
        "        if not self.seen[name]:\n            return found.fun",
        "        if self.seen[name]:\n            return found.fun",
        ("tests/apply/test_steps.py::test_every_loss_of_a_step_gets_the_policy",),
    ),
    Mutation(
        "no_warning",
        "A rule that selects nothing is silent.",
        "remat_kit/_frames.py",
        'warnings.warn(f"{message}\\nhint: {hint}", RematKitWarning, stacklevel=depth)',
        "del depth, message, hint",
        ("tests/apply/test_void.py::test_a_rule_that_selects_nothing_is_a_warning",),
    ),
    Mutation(
        "idle_at",
        "`inspect(at=...)` without a policy ignores `at`.",
        "remat_kit/_apply/void.py",
        "    if at is not None and policy is None:\n",
        "    if False:\n",
        ("tests/apply/test_void.py::test_a_keyword_without_an_effect_is_an_error",),
    ),
    # -- costs and budgets
    Mutation(
        "free_kernels",
        "A Pallas kernel costs nothing, so that plans run it twice.",
        "remat_kit/_program/ops.py",
        "return _kernel_flops(eqn) or 0.0",
        "return 0.0",
        (
            "tests/program/test_ops.py::test_a_pallas_kernel_counts_its_body_for_each_place_of_its_grid",
        ),
    ),
    Mutation(
        "percent",
        "A budget in percent is refused.",
        "remat_kit/_planner/search.py",
        '        if text.endswith("%"):\n',
        "        if False:\n",
        ("tests/planner/test_search.py::test_forms_of_a_budget",),
    ),
    # -- hostile input
    Mutation(
        "long_numbers",
        "A recipe with a number of a million digits is read for minutes.",
        "remat_kit/_policy/recipe.py",
        "_MAX_DIGITS = 1000\n",
        "_MAX_DIGITS = 10**9\n",
        ("tests/contract/test_errors.py::test_a_long_number",),
    ),
    Mutation(
        "another_program",
        "A plan is applied to a program that it was not made for.",
        "remat_kit/_apply/blocks.py",
        "_schedule.check(plan.program, program, strict=plan.strict, call=self.app.call)",
        "pass",
        ("tests/contract/test_errors.py::test_a_plan_for_another_program",),
    ),
    Mutation(
        "idle_options",
        "The command line ignores options that it cannot follow.",
        "remat_kit/_cli/commands.py",
        "    refuse_idle(options)\n",
        "    pass\n",
        (
            "tests/cli/test_arguments.py::test_an_option_without_an_effect_is_refused_before_the_work",
        ),
    ),
)
