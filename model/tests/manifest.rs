//! A model file that changed under its name is refused, tensor by tensor.

mod common;

use common::{data, gguf};
use dunlin_backend::Reference;
use dunlin_model::engine::StageSpec;
use dunlin_model::loader::ModelFiles;
use dunlin_model::manifest::Manifest;
use dunlin_model::stage::StageWeights;
use std::path::{Path, PathBuf};

/// A copy of the tiny model that a test may damage: folder and weight file.
fn tiny() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(data("tiny-llama")).unwrap().map(Result::unwrap) {
        // A cluster that served the fixture has left a manifest beside it.
        let manifest = entry.file_name().to_string_lossy().ends_with(".tensors.json");
        if entry.path().is_file() && !manifest {
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
    }
    let file = dir.path().join("model.safetensors");
    (dir, file)
}

/// Flips a bit of the file in a new inode, as a restored backup would: maps of the old one stay.
fn damage(file: &Path, from_the_end: usize) {
    let mut bytes = std::fs::read(file).unwrap();
    let at = bytes.len() - from_the_end;
    bytes[at] ^= 4;
    std::fs::remove_file(file).unwrap();
    std::fs::write(file, bytes).unwrap();
}

fn whole(files: &ModelFiles) -> StageSpec {
    StageSpec::whole(files.spec().layers, 1, 16, 16)
}

fn held(path: &Path) -> Option<ModelFiles> {
    let mut files = ModelFiles::open(path).unwrap();
    files.hold_to(Manifest::read(&files)?);
    Some(files)
}

#[test]
fn a_changed_tensor_is_refused_by_name_and_the_others_are_not() {
    let (dir, file) = tiny();
    assert!(held(dir.path()).is_none(), "nothing is known of it yet");
    let files = ModelFiles::open(dir.path()).unwrap();
    let made = Manifest::make(&files, 3);
    assert_eq!(made, Manifest::make(&files, 1));
    made.write(&files).unwrap();
    let files = held(dir.path()).expect("its own manifest");
    let stage = whole(&files);
    StageWeights::load(&Reference, &files, &stage).map(drop).expect("as it was");

    damage(&file, 3);
    let files = held(dir.path()).expect("the same header, hence the same manifest");
    let wrong: Vec<_> = files
        .tensor_names()
        .into_iter()
        .filter(|name| files.verify(&files.tensor(name).unwrap()).is_err())
        .collect();
    assert_eq!(wrong.len(), 1, "{wrong:?}");
    let error = StageWeights::load(&Reference, &files, &stage).map(drop).unwrap_err().to_string();
    for part in [wrong[0].as_str(), "has changed", "fetch the file again", ".tensors.json"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    // A stage that does not read the tensor is not concerned.
    let mut unread = StageSpec { last: false, ..stage.clone() };
    if wrong[0].contains("layers.0") {
        unread = StageSpec { layers: 1..2, first: false, ..stage };
    } else {
        unread.layers = 0..0;
    }
    let other = StageWeights::load(&Reference, &files, &unread);
    assert!(wrong[0].contains("embed") || other.is_ok(), "{:?}", other.err());
}

#[test]
fn another_model_under_the_name_gets_a_manifest_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, gguf::llama().build()).unwrap();
    let files = ModelFiles::open(&path).unwrap();
    Manifest::make(&files, 1).write(&files).unwrap();
    assert!(held(&path).is_some());
    std::fs::write(&path, gguf::llama().str("general.name", "another").build()).unwrap();
    assert!(held(&path).is_none());
    std::fs::write(&path, gguf::llama().build()).unwrap();
    assert!(held(&path).is_some());
    // A manifest that cannot be read is none.
    std::fs::write(Manifest::path(&path), "{").unwrap();
    assert!(held(&path).is_none());
}
