"""Which tests run by day, which at night, and in which part of the nights.

By day a test runs if its assertion can fail and no other day test fails with it. `BY_DAY` names the test
functions whose cases repeat one another, or take tens of seconds to say what a shorter test says too, and how
many of their cases run by day. The rest runs at night, in disjoint parts: `DAY=FILE` writes the cases of the
day, and `EVERYTHING=1 NIGHT=2/6 DAY=FILE` runs the second of six parts of all others. `make test-night` does.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer.core.config import Config
from registered import EVERYTHING

TESTS = Path(__file__).parent

FAMILIES_ALONE = "a file of each family is compared by day, in all its forms at night"
COMPILED = "torch compiles for tens of seconds; others of this file compile by day"
PROCESSES = "starts processes that import torch; test_spread_models.py does by day"
LONG = "a long run; its parts have tests of their own"
TRAINER = "the same calls of a Trainer"
MEMBERS = "members share the code; at night all"

BY_DAY: dict[str, dict[str, tuple[int, str]]] = {
    "training/tasks/test_sft.py": {
        "test_a_chat_model_is_tuned_and_chats": (1, "adapters have tests of their own"),
    },
    "reference/test_families.py": {
        "test_all_that_both_compute_is_equal": (1, FAMILIES_ALONE),
    },
    "reference/test_family_writing.py": {
        "test_weights_chunks_and_texts_are_the_same": (8, FAMILIES_ALONE),
    },
    "reference/test_gguf_files.py": {
        "test_stored_numbers_are_kept": (0, "files of every kind of numbers are read by day"),
    },
    "reference/test_conversion.py": {
        "test_what_covers_the_text_changes_nothing": (6, "one for each kind"),
    },
    "models/transformers/test_signatures.py": {
        "test_every_argument": (6, FAMILIES_ALONE),
    },
    "models/transformers/test_remote.py": {
        "test_folders_are_loaded_without_an_import": (0, LONG),
    },
    "models/transformers/test_trainer.py": {
        "test_losses_and_gradients": (1, TRAINER),
        "test_accumulating_is_one_large_batch": (1, TRAINER),
    },
    "models/attached/test_architectures.py": {
        "test_greedy_search_writes_the_same": (1, "one for each cache"),
        "test_outputs_and_gradients_are_those_of_transformers": (2, COMPILED),
    },
    "models/architectures/test_plain_transformer.py": {
        "test_beam_search": (1, "beams have tests of their own"),
    },
    "contracts/test_k12_compile.py": {
        "test_a_model_is_one_graph": (2, COMPILED),
        "test_a_model_with_padding_or_documents_is_one_graph": (1, COMPILED),
        "test_a_pattern_is_in_the_graph_around_it": (4, COMPILED),
    },
    "models/generation/test_compiled_step.py": {
        "test_the_next_process_reads_the_compiled_graph_from_the_cache": (0, COMPILED),
        "test_windows_read_a_buffer_of_fixed_size": (1, COMPILED),
        "test_compiled_code_reads_a_cache_of_integers": (0, COMPILED),
        "test_without_a_compiler_the_error_names_it": (0, PROCESSES),
        "test_a_step_reads_a_cache_of_integers": (6, COMPILED),
        "test_steps_run_one_by_one_if_a_graph_by_default_cannot_be_recorded": (0, COMPILED),
        "test_the_compiled_graph_generates_the_same_text_for_changed_weights": (0, COMPILED),
        "test_every_position_scheme_counts_from_the_slot": (8, MEMBERS),
        "test_every_search_generates_the_same_text": (8, "searches share one step"),
    },
    "models/attached/test_layers.py": {
        "test_a_graph_is_told_where_sequences_end": (1, COMPILED),
        "test_a_graph_of_the_whole_model": (0, "test_compiled.py has such a graph, with a cache"),
    },
    "models/attached/test_compiled.py": {
        "test_what_is_attached_goes_into_the_graph": (1, COMPILED),
        "test_a_static_cache_needs_one_graph": (1, COMPILED),
        "test_masks_made_inside_a_graph_say_where_tokens_are": (0, COMPILED),
        "test_a_cache_filled_by_a_graph": (0, COMPILED),
    },
    "models/architectures/test_cross_attention.py": {
        "test_a_compiled_step_reads_stated_spans": (0, COMPILED),
    },
    "models/export/test_exported_blocks.py": {
        "test_onnxruntime_gives_the_hidden_states": (0, COMPILED),
        "test_a_graph_gives_the_hidden_states_of_padded_texts": (1, COMPILED),
        "test_a_decoder_without_a_cache_reads_windows_in_blocks": (0, COMPILED),
    },
    "models/export/test_exported_decoder.py": {
        "test_a_graph_continues_padded_texts_of_any_length": (1, COMPILED),
        "test_a_graph_has_the_bounds_that_memory_planning_needs": (1, COMPILED),
    },
    "models/export/test_exported_encoder_decoder.py": {
        "test_onnxruntime_decodes_the_same_tokens_of_padded_sources": (1, COMPILED),
        "test_an_onnx_decoder_has_named_axes": (0, COMPILED),
        "test_a_target_is_read_in_parts_of_any_length": (0, COMPILED),
        "test_without_a_cache_a_graph_reads_both_texts": (0, COMPILED),
        "test_the_description_names_layers_of_both_graphs": (0, COMPILED),
        "test_a_classifier_of_both_stacks_reads_the_source_alone": (0, COMPILED),
        "test_both_graphs_have_the_bounds_that_memory_planning_needs": (0, COMPILED),
    },
    "attention/functional/test_flex.py": {
        "test_the_kernel_for_a_cpu_agrees": (0, "test_flex_patterns.py does"),
        "test_lengths_and_windows_may_change_on_a_cpu": (0, COMPILED),
        "test_flex_attention_agrees_when_run_as_it_is_written": (4, "patterns share the kernel"),
    },
    "nn/memory/test_sinks.py": {
        "test_generation_with_graphs_drafts_and_without_is_the_same": (0, COMPILED),
    },
    "training/test_training_loop.py": {
        "test_compiling_changes_neither_the_mathematics_nor_the_names": (0, COMPILED),
    },
    "nn/stack/test_rolling.py": {
        "test_a_rolling_cache_equals_a_full_cache": (4, "patterns share the slots"),
        "test_generated_texts_are_the_same": (3, "searches share the slots"),
        "test_any_position_scheme": (4, "schemes count the same slots"),
        "test_the_last_tokens_can_be_removed": (1, "searches share the slots"),
    },
    "nn/cache/test_policies.py": {
        "test_a_policy_is_dense_attention_with_masked_keys": (24, "policies share a cache"),
    },
    "training/distributed/test_divided_runs.py": {
        "*": (0, PROCESSES),
    },
    "data/test_chat_templates.py": {
        "test_a_template_that_would_not_end_is_stopped": (4, "each takes its second"),
    },
    "applications/serving/test_clients.py": {
        "test_lm_eval_scores_and_generates": (0, "test_server.py compares the same scores"),
    },
    "applications/serving/test_server.py": {
        "test_a_time_limit_ends_a_text": (0, PROCESSES),
    },
    "applications/retrieval/test_milvus_store.py": {
        "test_a_server_that_dies_in_the_middle": (0, "waits for a server to end"),
    },
    "training/distributed/test_predictions.py": {
        "test_processes_hold_and_send_what_is_predicted": (0, PROCESSES),
    },
    "training/distributed/test_killed_workers.py": {
        "*": (0, PROCESSES),
    },
    "training/test_gpu_training.py": {
        "test_torchrun_with_one_process": (0, PROCESSES),
    },
    "attention/functional/test_spread_attention.py": {
        "test_processes_compute_what_one_does": (0, PROCESSES),
    },
    "applications/retrieval/test_milvus_builders.py": {
        "*": (0, PROCESSES),
    },
    "lab/test_engine.py": {
        "test_a_study_that_cannot_be_prepared_stops_no_other": (
            0,
            "a study that is killed stops no other by day",
        ),
        "test_a_cell_that_fails_stops_no_other": (0, PROCESSES),
        "test_what_is_killed_goes_on_with_the_rest": (0, PROCESSES),
    },
    "lab/test_bench.py": {
        "test_the_command_measures_in_processes_and_goes_on_after_a_kill": (0, PROCESSES),
    },
    "cli/test_evaluate_progress.py": {
        "test_a_killed_evaluation_goes_on": (0, "killed training has a day test"),
    },
    "test_gpu_program.py": {
        "*": (0, "runs `make gpu` in small"),
    },
    "training/recipes/test_system_recipes.py": {
        "test_a_system_recipe_trains_to_a_finite_loss": (4, "the recipes are built by day"),
    },
    "training/tasks/test_image_task.py": {
        "test_colours_are_three_tokens_a_pixel_and_are_learned": (0, LONG),
    },
    "training/test_temperature.py": {
        "test_divided_weights_are_calibrated_like_whole_ones": (1, PROCESSES),
    },
    "training/test_two_processes_remember.py": {
        "test_two_processes_are_one": (1, PROCESSES),
        "test_another_number_of_processes_goes_on": (0, PROCESSES),
        "test_a_killed_run_goes_on_bit_for_bit": (1, PROCESSES),
    },
    "cli/plots/test_explorer_terms.py": {
        "test_rows_add_up_to_the_recorded_weight": (3, "the terms share one page"),
    },
    "cli/plots/test_saved_pictures.py": {
        "test_a_drawing_is_saved_as_svg": (1, "the views share one button"),
        "test_a_canvas_is_saved_as_png": (1, "the views share one button"),
    },
    "test_tutorials.py": {
        "test_own_attention": (0, LONG),
        "test_memories": (0, LONG),
        "test_translator": (0, LONG),
    },
    "test_examples.py": {
        "test_dependency_tree": (0, LONG),
        "test_plain_transformer": (0, LONG),
        "test_plain_loop": (0, LONG),
        "test_own_data": (0, LONG),
        "test_embeddings": (0, LONG),
        "test_trainer": (0, LONG),
    },
    "attention/functional/test_flex_patterns.py": {
        "test_compiled_patterns_agree_on_a_cpu": (0, COMPILED),
    },
    "cli/test_own_output.py": {
        "test_other_libraries_are_not_heard": (0, LONG),
    },
    "cli/test_import.py": {
        "test_every_command_takes_it": (0, "the commands share one option"),
    },
    "contracts/test_k14_int8.py": {
        "test_it_survives_the_disk_bitwise_and_says_what_it_is": (40, MEMBERS),
        "test_it_computes_what_the_same_weights_in_floating_point_do": (80, MEMBERS),
    },
    "cli/test_export_command.py": {
        "test_a_translator_decodes_with_the_program_of_the_documentation": (
            0,
            "models/export decodes by day",
        ),
    },
    "reference/test_family_configs.py": {
        "test_sizes_are_the_published_ones": (8, "tables of the same kind"),
    },
    "attention/functional/test_fused_rows.py": {
        "test_agrees_with_the_definition": (16, "patterns share the rows"),
    },
    "test_distribution.py": {
        "test_the_wheel_holds_the_package": (0, "builds both distributions"),
        "test_the_source_distribution_holds_the_repository": (0, "builds both distributions"),
    },
    "lab/test_claims.py": {
        "test_every_other_study_has_recipes_of_models": (20, "recipes of one form"),
    },
    "docs/test_member_pages.py": {
        "test_the_code_of_its_page_runs": (6, "pages of one form"),
    },
    "models/transformers/test_copies.py": {
        "test_an_average_of_weights_is_kept_in_training": (1, TRAINER),
        "test_a_copy_computes_the_same": (12, "families share one loader"),
    },
    "models/transformers/test_generation.py": {
        "test_texts": (3, "searches share one loop"),
    },
    "test_forking.py": {
        "test_a_program_is_what_a_new_interpreter_runs": (1, PROCESSES),
    },
    "test_mutants.py": {
        "test_a_mutant_lives_in_a_process_of_its_own": (0, PROCESSES),
        "test_a_mutant_that_crashes_or_does_not_end_has_no_result": (0, PROCESSES),
    },
    "lab/test_attention_bench.py": {
        "test_peak_memory_is_what_a_call_needs_beside_its_inputs": (0, PROCESSES),
        "test_what_does_not_fit_is_a_note": (0, PROCESSES),
    },
    "training/rl/test_continuous.py": {
        "test_a_policy_learns_where_to_aim": (0, LONG),
    },
    "attention/positions/test_composition.py": {
        "test_a_scheme_in_a_decoder_is_its_equation": (14, MEMBERS),
        "test_a_scheme_in_an_encoder_is_its_equation": (14, MEMBERS),
    },
    "contracts/test_k1_definition.py": {
        "test_mechanism_equals_its_definition": (30, MEMBERS),
        "test_model_is_the_same_through_every_backend": (80, MEMBERS),
    },
    "core/ops/test_compiled_code.py": {
        "test_a_graph_of_a_single_row_gives_the_products_of_torch": (1, COMPILED),
    },
    "models/transformers/test_offload.py": {
        "test_offloaded_weights_change_nothing": (12, "families share one loader"),
    },
    "reference/test_long_texts.py": {
        "test_the_documentation_names_the_families_whose_long_texts_differ": (0, LONG),
    },
    "contracts/test_k13_cost.py": {
        "test_a_mechanism_grows_as_it_promises": (12, MEMBERS),
        "test_a_pattern_grows_as_it_promises": (12, MEMBERS),
    },
    "contracts/test_k15_speculation.py": {
        "test_a_draft_changes_no_token": (40, MEMBERS),
    },
    "contracts/test_k11_precision.py": {
        "test_models_run_in_half_precision": (100, MEMBERS),
    },
    "contracts/test_degenerate.py": {
        "test_models_take_batches_without_a_row_or_a_token": (60, MEMBERS),
    },
    "contracts/test_precisions.py": {
        "test_a_training_step_is_near_float64_and_finite": (120, MEMBERS),
    },
    "contracts/test_k5_state.py": {
        "test_a_state_is_a_value": (30, MEMBERS),
        "test_any_split_is_one_pass": (100, MEMBERS),
    },
    "attention/functional/test_by_residue_class.py": {
        "test_residue_classes_are_the_definition": (8, "patterns share the classes"),
    },
    "cli/test_tune_command.py": {
        "test_it_measures_keeps_shows_and_pins": (0, LONG),
    },
    "cli/test_evaluate_command.py": {
        "test_other_files_with_the_same_rows_have_the_same_metrics": (2, "formats have tests of their own"),
    },
    "attention/positions/test_sink_cache.py": {
        "test_a_scheme_that_counts_in_a_cache_is_its_equation": (12, MEMBERS),
    },
    "models/transformers/test_peft.py": {
        "test_adapted_layers": (6, "families share the layers"),
    },
    "models/attached/test_bounded.py": {
        "test_the_model_is_our_model_with_the_same_rule": (4, "families share one rule"),
    },
    "models/generation/test_beam.py": {
        "test_every_option_is_the_reference": (8, "options share one search"),
    },
    "attention/patterns/test_mods.py": {
        "test_a_mask_is_flex_attentions_in_every_backend": (8, "patterns share the backends"),
        "test_chunks_of_queries_see_what_one_pass_sees": (8, "patterns share the chunks"),
        "test_a_score_mod_is_flex_attentions_in_every_backend": (5, "patterns share the backends"),
    },
    "contracts/test_isolation.py": {
        "test_what_is_hidden_does_not_reach": (70, MEMBERS),
    },
    "applications/test_harness.py": {
        "test_the_command_prints_the_table": (0, LONG),
    },
    "training/test_two_processes.py": {
        "test_a_signal_to_one_stops_both_at_the_next_row": (0, PROCESSES),
    },
}
"""By file and function ("*": all others of a file) how many cases run by day, and why no more.

With `FAMILIES_ALONE` so many of each family, if the cases name it.
"""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what runs by day, or in the part of the night that `NIGHT` names; `DAY` alone writes its file."""
    night, file = os.environ.get("NIGHT"), Path(os.environ.get("DAY", ""))
    if night:
        part, _, parts = night.partition("/")
        by_day = set(json.loads(file.read_text()))
        kept = [item for item in items if key(item) not in by_day and in_part(item, int(part), int(parts))]
    else:
        kept = items if EVERYTHING else list(of_day(items))
        if file.name:
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(sorted(map(key, kept))))
            pytest.exit(f"{len(kept)} cases run by day", returncode=0)
    ids = set(map(id, kept))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in ids])
    items[:] = kept


def of_day(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the first cases of the functions in `BY_DAY`, and all others."""
    seen: dict[tuple[str, Any], int] = {}
    for item in items:
        if item.get_closest_marker("nightly"):
            continue
        file, name = str(item.path.relative_to(TESTS)), getattr(item, "originalname", item.name)
        limits = BY_DAY.get(file, {})
        limit = limits.get(name) or limits.get("*")
        params = item.callspec.params if hasattr(item, "callspec") else {}
        group = f"{file}::{name}", params.get("name") if FAMILIES_ALONE in (limit or ()) else None
        seen[group] = seen.get(group, 0) + 1
        if limit is None or seen[group] <= limit[0]:
            yield item


def key(item: pytest.Item) -> str:
    """Return what names a case, whatever others are collected with it.

    An id may be a number, which shifts, so the values count too: a case in doubt runs twice and not never.
    """
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return hashlib.sha256(f"{item.nodeid} {text(params, 3)}".encode(errors="replace")).hexdigest()[:20]


def text(value: Any, deep: int = 2) -> str:
    """Return a value as text, without the addresses of objects, and without what is nested more deeply."""
    if isinstance(value, dict | list | tuple):
        parts = value.items() if isinstance(value, dict) else value
        return f"({', '.join(text(part, deep - 1) for part in parts)})" if deep else "..."
    if isinstance(value, int):
        return hex(value)  # of any size
    if isinstance(value, str | bytes | float | None) or type(value).__str__ is not object.__str__:
        return str(value)
    if isinstance(value, Config | torch.dtype):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def in_part(item: pytest.Item, part: int, parts: int) -> bool:
    """Whether a test of the night belongs to a part, counted from 1."""
    return zlib.crc32(item.nodeid.encode()) % parts == part - 1
