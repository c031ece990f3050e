"""Every sentence and row of SECURITY.md that promises something has tests with the hostile case itself."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nights import BY_DAY
from registered import nightly

ROOT = Path(__file__).parents[2]
SECTIONS = "Trusted and untrusted input", "Never executed", "Limits", "Names on the hub"
IMPORTS = "cli/test_import.py::test_a_recipe_does_not_import_what_the_command_line_does_not_name"
STUDIES = "lab/test_engine.py::test_an_experiment_imports_only_what_the_command_line_names"
GRAPHS = "core/ops/test_compiled_code.py::test_a_graph_that_this_user_has_not_compiled_is_never_unpickled"
SHARED = (
    "core/ops/test_compiled_code.py::test_a_shared_folder_of_graphs_is_neither_read_nor_written",
    "core/ops/test_compiled_code.py::test_torch_s_cache_is_where_no_other_user_can_write",
    "core/test_private_files.py::test_a_file_of_another_user_is_refused",
)
SIGNED = "core/test_private_files.py::test_a_signed_file_is_read_and_only_its_user_can_read_it"
CODE = "cli/test_checkpoint_code.py::test_no_command_runs_code_or_asks"
PICKLED = "models/checkpoints/test_pickled_weights.py::test_a_pickle_is_refused_and_nothing_in_it_runs"
INDEX = "models/checkpoints/test_bad_weights.py::test_an_index_names_files_of_its_own_folder_only"
IMAGES = "data/test_paths_in_data.py::test_an_image_of_a_saved_data_set_is_inside_it"
LIMIT = "core/test_limits.py::test_a_file_beyond_a_limit_is_refused"
REVISIONS = "models/checkpoints/test_hub_names.py::test_a_name_means_what_it_was_at_a_revision"
SLOW = "data/test_web_servers.py::test_a_failing_server_is_an_error_in_words_and_in_time"
LINKS = "docs/test_untrusted_input.py::test_links_out_of_a_folder_are_refused"
RUN = "docs/test_untrusted_input.py::test_a_changed_run_imports_nothing"
ADVICE = ()
"""Of sentences that advise or introduce, and promise nothing that could fail."""

ROWS: dict[str, tuple[str, ...]] = {
    "code: `--import`, entry points, a `Config` class, a `mask_mod` | yes | anything": (
        "docs/test_untrusted_input.py::test_code_that_is_named_runs",
        "test_own_member.py::test_installed_members_are_listed_trained_saved_and_loaded",
    ),
    "cache of compiled code | with this user's signature | run the code that this user compiled; other files "
    "and shared folders are not read": (GRAPHS, *SHARED),
    "checkpoint | no | read the files of its folder": (LINKS, CODE, PICKLED, INDEX),
    "tokenizer | no | read the files of its folder": (
        LINKS,
        "cli/test_checkpoint_code.py::test_tokenizers_and_image_processors",
        "data/test_tokenizer_files.py::test_a_pickle_is_refused",
    ),
    "saved state of a text (`generate --state`) | no | read this file; it must be of a model with the same "
    "weights": (
        "models/generation/test_saved_text.py::test_a_damaged_file_is_an_input_error",
        "models/generation/test_saved_text.py::test_a_file_of_another_model_is_refused",
        "models/generation/test_saved_text.py::test_a_state_alone_and_a_pickle_are_refused",
    ),
    "chat template | no | compute a text, within limits of time, memory and length; open no file": (
        "data/test_chat_templates.py::test_a_template_that_would_not_end_is_stopped",
        "data/test_chat_templates.py::test_a_template_stays_in_its_sandbox",
        "data/test_chat_templates.py::test_the_process_of_a_template_opens_no_file",
    ),
    "request to `polyformer serve` | no | receive texts and vectors of the served model, within the limits "
    "of the server": (
        "applications/serving/test_server.py::test_wrong_parameters_are_refused_by_name",
        "applications/serving/test_server.py::test_bodies_that_are_no_requests",
        "applications/serving/test_server.py::test_hostile_requests_do_not_change_others",
        "applications/serving/test_server.py::test_a_full_queue_asks_clients_to_come_again",
    ),
    "recipe | no | read the data and checkpoints that it names anywhere, or request their addresses; import "
    "only polyformer, gymnasium, minigrid and popgym": (
        "docs/test_untrusted_input.py::test_a_recipe_reads_data_anywhere",
        "docs/test_untrusted_input.py::test_a_recipe_imports_no_module_of_environments",
        "cli/test_import.py::test_a_recipe_imports_modules_of_this_project",
        IMPORTS,
    ),
    "experiment | no | the same as its recipes; write in the output folder; use the figures in it as they "
    "are": (
        "docs/test_untrusted_input.py::test_figures_of_an_experiment_are_used_as_they_are",
        STUDIES,
        "lab/test_engine.py::test_nothing_is_written_outside_of_the_folder",
    ),
    "run | no | the same as its recipe, when it is resumed or evaluated; write in its folder": (
        RUN,
        "docs/test_untrusted_input.py::test_a_run_writes_nothing_through_links",
        "docs/test_untrusted_input.py::test_a_pickle_in_the_place_of_any_file_of_a_run_is_not_loaded",
    ),
    "file of data | no | read this file, and the labels beside an IDX file of images": (
        "docs/test_untrusted_input.py::test_rows_of_a_file_of_data_name_no_other_file",
        "data/test_images.py::test_labels_are_read_from_the_file_next_to_the_images",
    ),
    "saved data set | no | read the files and images inside its folder": (
        IMAGES,
        "data/test_paths_in_data.py::test_no_address_is_requested",
        "data/test_paths_in_data.py::test_the_files_of_a_saved_data_set_are_inside_it",
    ),
    "data set of the hub | no | read files and images on the hub": (
        "data/test_paths_in_data.py::test_an_image_of_a_hub_data_set_is_on_the_hub",
    ),
    "folder of labels, pattern | no | read the files inside the folder": (
        "data/test_paths_in_data.py::test_a_folder_of_labels_has_no_links_to_other_places",
        "data/test_paths_in_data.py::test_a_pattern_follows_no_link_to_another_place",
    ),
    "address of a file | no | request the address that you named, and those that its server redirects to": (
        "docs/test_untrusted_input.py::test_only_the_server_of_an_address_is_asked",
    ),
    "recorded episodes | no | read the files of its folder; import nothing": (
        "training/rl/test_minari_source.py::test_no_part_of_a_data_set_is_elsewhere",
        "training/rl/test_minari_source.py::test_data_without_spaces_make_nothing_be_imported",
    ),
    "datastore, prepared text, neighbours | no | read the files of its folder": (LINKS,),
    "choices of kernels (`polyformer tune`) | no | change the speed": (
        "docs/test_untrusted_input.py::test_choices_change_no_result",
    ),
}
SENTENCES: dict[str, tuple[str, ...]] = {
    "Code runs only from what you named on the command line or installed.": (IMPORTS, STUDIES, CODE, RUN),
    "Everything else is untrusted: reading it either succeeds or raises an `InputError`.": (
        "docs/test_untrusted_input.py::test_a_pickle_in_the_place_of_any_file_of_a_run_is_not_loaded",
        "fuzz/test_fuzz_checkpoints.py::test_config_files",
        "fuzz/test_fuzz_experiments.py::test_experiments",
        "fuzz/test_fuzz_stores_and_requests.py::test_indexes_of_stores",
        "fuzz/test_fuzz_texts.py::test_own_data",
        "fuzz/test_fuzz_texts.py::test_recipes",
        "fuzz/test_fuzz_texts.py::test_tokenizers",
    ),
    "Python files that a recipe or an experiment names by `imports:` must also be named by `--import`.": (
        IMPORTS,
        STUDIES,
    ),
    "Check the paths in a recipe before you run it.": ADVICE,
    "A pickle from elsewhere never creates Python objects.": (
        "docs/test_untrusted_input.py::test_a_pickle_in_the_place_of_any_file_of_a_run_is_not_loaded",
        PICKLED,
        GRAPHS,
    ),
    "Weights are safetensors or GGUF.": ("docs/test_untrusted_input.py::test_what_is_saved_has_no_pickle",),
    "`pytorch_model.bin` is refused unless you set `allow_pickle=True`, and then it is read with "
    "`weights_only`, which runs no code.": (
        PICKLED,
        "models/checkpoints/test_pickled_weights.py::test_a_file_of_tensors_where_it_is_allowed",
    ),
    "The code of a checkpoint never runs, and no prompt offers to run it.": (CODE,),
    "`auto_map` and Python files next to the weights are ignored or refused.": (
        "docs/test_untrusted_input.py::test_python_files_beside_weights_are_ignored",
        CODE,
    ),
    "If transformers loads the model (`explore --transformers`, `evaluate`, `datastore build`), polyformer "
    "sets `trust_remote_code=False`, accepts only safetensors, and refuses hub kernels and adapters that "
    "name another model.": (
        CODE,
        "docs/test_untrusted_input.py::test_transformers_reads_no_pickle",
        "cli/test_checkpoint_code.py::test_kernels_are_code_too",
        "cli/test_checkpoint_code.py::test_the_base_of_an_adapter_is_not_fetched",
        "cli/test_checkpoint_code.py::test_one_module_loads_from_transformers",
    ),
    "Compiled code is a pickle with machine code.": (GRAPHS,),
    "Graphs in the cache folder have a signature by a key of mode 0600 (`key` in the user's state folder).": (
        GRAPHS,
        SIGNED,
    ),
    "A cache folder that others can write is not used, and torch's is replaced, both with a warning.": SHARED,
    'Expressions (`"Window(256) | Global(1)"`) are parsed, never evaluated.': (
        "docs/test_untrusted_input.py::test_expressions_are_not_evaluated",
    ),
    "Rules of experiments are computed with floats.": (
        "lab/test_rule_expressions.py::test_what_cannot_be_computed_is_an_error_in_words",
        "lab/test_rule_expressions.py::test_nothing_else_is_evaluated",
    ),
    "YAML is read without tags and aliases.": (
        "docs/test_untrusted_input.py::test_yaml_has_neither_tags_nor_aliases",
    ),
    "Every input and every requested size has a limit, on the command line and in Python.": (LIMIT,),
    "Both are checked before memory for them is allocated:": (
        "docs/test_untrusted_input.py::test_a_size_is_checked_before_memory_is_allocated",
        LIMIT,
    ),
    "`polyformer/core/ranges.py` defines the limits and explains them.": (
        "core/test_limits.py::test_every_limit_has_a_case",
    ),
    "More checks:": ADVICE,
    "The options of a config.json are checked by type and range before use, tensor names and shapes before "
    "loading, and weights for NaN and infinity.": (
        "models/checkpoints/test_bad_configs.py::test_values_that_no_config_has",
        "models/checkpoints/test_bad_weights.py::test_unexpected_tensor_and_the_nearest_name",
        "models/checkpoints/test_bad_weights.py::test_misshapen_tensor",
        "models/architectures/test_weights.py::test_a_number_that_is_none_is_named",
    ),
    "Files named by an index or by a row of data must be in its folder.": (INDEX, IMAGES),
    "Paths and links that leave it are refused, also links in the place of a file of a checkpoint, tokenizer "
    "or store.": (LINKS, INDEX, IMAGES),
    "Links into the hub cache, and a link to a whole folder, are followed.": (
        "docs/test_untrusted_input.py::test_links_of_the_hub_and_of_whole_folders_are_followed",
        "models/checkpoints/test_bad_weights.py::test_the_links_of_the_hubs_cache_are_followed",
    ),
    "A web server must answer in 60 seconds and send 1 KiB per second on average.": (
        "docs/test_untrusted_input.py::test_the_patience_with_servers",
        SLOW,
    ),
    "Files in a run or a checkpoint are not written through links of files or of folders.": (
        "docs/test_untrusted_input.py::test_a_run_writes_nothing_through_links",
        "core/test_paths.py::test_a_link_inside_a_folder_of_the_library_is_replaced",
    ),
    "A link that you name (`--out`) is followed.": (
        "core/test_paths.py::test_a_link_stays_and_its_target_is_replaced",
    ),
    "FIFOs and devices are not read.": (
        "training/test_fifos.py::test_no_reader_of_a_run_waits_for_a_fifo",
        "data/test_paths_in_data.py::test_a_fifo_is_not_waited_for",
        "core/test_files.py::test_only_regular_files_are_opened_to_read",
    ),
    "Of a Parquet file the stated size of a row group is checked before it is read.": (
        "data/test_parquet.py::test_a_file_that_expands_to_gigabytes_is_refused",
    ),
    "The values of a batch (at most 256 rows) are counted when it has been read, so a crafted list of "
    "many equal numbers takes its memory first.": (
        "data/test_parquet.py::test_a_file_that_expands_to_gigabytes_is_refused",
    ),
    "The limits protect against small files with a large cost.": (LIMIT,),
    "They are not a sandbox: a large model needs its memory and a large data set needs its time.": ADVICE,
    "Run untrusted input under limits of the operating system.": ADVICE,
    "A name on the hub refers to the latest upload of its owner.": (REVISIONS,),
    "Pin a version that you have checked: `from_pretrained(name, revision=COMMIT)`, `load_tokenizer(name, "
    "revision=COMMIT)`, or `NAME@COMMIT` on the command line and in recipes.": (
        REVISIONS,
        "models/checkpoints/test_hub_names.py::test_commands_and_recipes_name_a_revision",
    ),
}


def section(title: str) -> str:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def sentences() -> Iterator[str]:
    """The sentences of the sections, without tables."""
    for title in SECTIONS:
        text = re.sub(r"<!-- limits -->.*<!-- /limits -->", "", section(title), flags=re.DOTALL)
        for part in re.split(r"\n(?=\n|- |\|)", text):
            line = " ".join(part.lstrip("\n- ").split())
            if line and not line.startswith("|"):
                yield from re.split(r"(?<=[.:]) (?=[A-Z`])(?<!checked: )", line)


def test_every_sentence_and_row_has_its_tests():
    assert [*sentences()] == [*SENTENCES]
    table = re.findall(r"^\| (.*) \|$", section(SECTIONS[0]), re.MULTILINE)
    assert table[0] == "input | trusted | what reading it can do"
    assert table[1:] == [*ROWS]


def names() -> set[str]:
    """The tests that the tables name."""
    return {name for row in (*ROWS.values(), *SENTENCES.values()) for name in row}


@pytest.mark.parametrize("name", sorted(names()))
def test_its_tests_exist_and_run_by_day(name: str):
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    (test,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    assert "nightly" not in map(ast.unparse, test.decorator_list)
    limits = BY_DAY.get(file, {})
    assert (limits.get(function) or limits.get("*") or (1, ""))[0] > 0


@nightly
def test_pytest_collects_them():
    files = sorted({f"tests/{name.partition('::')[0]}" for name in names()})
    words = "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *files
    # Not in a fork: pytest warns of modules that are imported before it.
    alone = {**os.environ, "EVERYTHING": "", "NIGHT": "", "DAY": ""}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=alone, capture_output=True, text=True)
    listed = done.stdout
    by_day = {line.partition("[")[0] for line in listed.splitlines() if "::" in line}
    assert {f"tests/{name}" for name in names()} - by_day == set()
