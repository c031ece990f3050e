"""Every row of the table of trust in SECURITY.md has tests that show it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWN_BY = {
    "code: `--import`, entry points, a `Config` class, a `mask_mod`": (
        "cli/test_import.py::test_every_command_takes_it",
        "test_own_member.py::test_installed_members_are_listed_trained_saved_and_loaded",
    ),
    "cache of compiled code": (
        "core/ops/test_compiled_code.py::test_a_graph_that_this_user_has_not_compiled_is_never_unpickled",
        "core/ops/test_compiled_code.py::test_a_shared_folder_of_graphs_is_neither_read_nor_written",
        "core/ops/test_compiled_code.py::test_torch_s_cache_is_where_no_other_user_can_write",
        "core/test_private_files.py::test_any_other_file_counts_as_missing",
        "core/test_private_files.py::test_what_belongs_to_others_is_refused",
    ),
    "checkpoint": (
        "cli/test_checkpoint_code.py::test_no_command_runs_code_or_asks",
        "models/checkpoints/test_bad_weights.py::test_an_index_follows_no_link_out_of_its_folder",
        "models/checkpoints/test_pickled_weights.py::test_a_pickle_is_refused_and_nothing_in_it_runs",
        "fuzz/test_fuzz_stores_and_requests.py::test_heads_of_gguf",
    ),
    "tokenizer": (
        "cli/test_checkpoint_code.py::test_tokenizers_and_image_processors",
        "data/test_tokenizer_files.py::test_a_pickle_is_refused",
        "fuzz/test_fuzz_texts.py::test_tokenizers",
    ),
    "recipe": (
        "cli/test_import.py::test_a_recipe_does_not_import_what_the_command_line_does_not_name",
        "cli/test_import.py::test_a_name_like_those_of_this_project_is_not_imported",
        "fuzz/test_fuzz_texts.py::test_recipes",
    ),
    "experiment": (
        "lab/test_engine.py::test_an_experiment_imports_only_what_the_command_line_names",
        "lab/test_engine.py::test_nothing_is_written_outside_of_the_folder",
        "lab/test_engine.py::test_damaged_rows_are_named",
        "lab/test_rule_expressions.py::test_what_cannot_be_computed_is_an_error_in_words",
        "fuzz/test_fuzz_experiments.py::test_experiments",
    ),
    "run": (
        "cli/test_import.py::test_every_command_takes_it",
        "training/test_metrics_and_display.py::test_a_row_of_other_values_than_numbers_is_named",
    ),
    "file of data": (
        "fuzz/test_fuzz_texts.py::test_own_data",
        "fuzz/test_fuzz_stores_and_requests.py::test_bytes_of_parquet",
    ),
    "saved data set": (
        "data/test_paths_in_data.py::test_an_image_of_a_saved_data_set_is_inside_it",
        "data/test_paths_in_data.py::test_no_address_is_requested",
        "data/test_paths_in_data.py::test_the_files_of_a_saved_data_set_are_inside_it",
        "data/test_paths_in_data.py::test_a_fifo_is_not_waited_for",
    ),
    "data set of the hub": ("data/test_paths_in_data.py::test_an_image_of_a_hub_data_set_is_on_the_hub",),
    "folder of labels, pattern": (
        "data/test_paths_in_data.py::test_a_folder_of_labels_has_no_links_to_other_places",
        "data/test_paths_in_data.py::test_a_pattern_follows_no_link_to_another_place",
    ),
    "address of a file": (
        "data/test_web_servers.py::test_all_servers_send_the_same_rows",
        "data/test_web_servers.py::test_what_a_server_fails_to_send_is_an_error_in_words_and_in_time",
    ),
    "recorded episodes": (
        "training/rl/test_minari_source.py::test_data_without_spaces_make_nothing_be_imported",
    ),
    "datastore": (
        "applications/retrieval/test_store_faults.py::test_a_manifest_that_is_not_true",
        "fuzz/test_fuzz_stores_and_requests.py::test_indexes_of_stores",
    ),
    "choices of kernels (`polyformer tune`)": (
        "core/ops/test_tuning.py::test_a_damaged_file_counts_as_none",
    ),
}


def rows() -> list[str]:
    """The inputs in the table."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    table = text.partition("| input | trusted |")[2].partition("\n\n")[0]
    return re.findall(r"^\| (.*?) \| (?:yes|no|with)", table, re.MULTILINE)


@cache
def functions(file: str) -> set[str]:
    """The test functions in a file."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_table_has_these_rows():
    assert rows() == [*SHOWN_BY]


@pytest.mark.parametrize("name", sorted({name for names in SHOWN_BY.values() for name in names}))
def test_its_tests_exist(name: str):
    file, _, function = name.partition("::")
    assert function in functions(file)
