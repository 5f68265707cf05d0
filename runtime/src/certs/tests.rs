use std::os::unix::fs::PermissionsExt;

use super::*;

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| name.to_string()).collect()
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn bundles_are_made_once_and_load() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("certs");
    let first = ensure(&dir, "lab", &names(&["front", "left"])).unwrap();
    assert!(first.made_authority);
    assert_eq!(first.made, ["front", "left"]);
    let front = NodeIdentity::load(&dir, "front").unwrap();
    let left = NodeIdentity::load(&dir, "left").unwrap();
    assert_eq!(front.cluster_id, left.cluster_id);
    assert_ne!(front.reset_key, left.reset_key);
    for secret in ["ca.key", "bundle-left/node.key", "bundle-left/quic.key"] {
        assert_eq!(mode(&dir.join(secret)), 0o600, "{secret}");
    }
    let second = ensure(&dir, "lab", &names(&["front", "left", "right"])).unwrap();
    assert!(!second.made_authority);
    assert_eq!(second.present, ["front", "left"]);
    assert_eq!(second.made, ["right"]);
    assert_eq!(NodeIdentity::load(&dir, "left").unwrap().chain, left.chain);
    let debug = format!("{left:?}");
    assert_eq!(debug, format!("NodeIdentity(left.{}.dunlin)", hex(&left.cluster_id)));
}

#[test]
fn a_bundle_serves_on_a_machine_without_the_authority() {
    let (home, away) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    ensure(home.path(), "lab", &names(&["front", "left"])).unwrap();
    let (from, to) = (bundle_path(home.path(), "left"), bundle_path(away.path(), "left"));
    std::fs::create_dir(&to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let ensured = ensure(away.path(), "lab", &names(&["left"])).unwrap();
    assert_eq!(ensured.present, ["left"]);
    assert!(!ensured.made_authority);
    NodeIdentity::load(away.path(), "left").unwrap();
    let error = ensure(away.path(), "lab", &names(&["right"])).unwrap_err();
    assert!(matches!(&error, CertError::NoAuthority { node, .. } if node == "right"), "{error}");
    let error = NodeIdentity::load(away.path(), "right").unwrap_err();
    assert!(error.to_string().contains("copy its folder bundle-right"), "{error}");
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    ensure(one.path(), "lab", &names(&["left", "right"])).unwrap();
    ensure(other.path(), "lab", &names(&["left"])).unwrap();
    let bundle = bundle_path(one.path(), "left");
    let from_other = bundle_path(other.path(), "left");
    let from_right = bundle_path(one.path(), "right");
    let refused = |file: &str, from: &Path, expected: &str| {
        let good = std::fs::read(bundle.join(file)).unwrap();
        std::fs::copy(from.join(file), bundle.join(file)).unwrap();
        let error = NodeIdentity::load(one.path(), "left").unwrap_err().to_string();
        std::fs::write(bundle.join(file), good).unwrap();
        NodeIdentity::load(one.path(), "left").unwrap();
        assert!(error.contains(expected), "{file}: {error}");
        assert!(!error.contains("PRIVATE"), "{error}");
    };
    refused("ca.pem", &from_other, "is not a certificate of node left");
    refused("node.pem", &from_other, "is not a certificate of node left");
    refused("node.pem", &from_right, "not valid for name");
    refused("node.key", &from_right, "node.key does not fit");
    refused("cluster.id", &from_other, "is not a certificate of node left");
}

#[test]
fn damaged_and_exposed_files_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    ensure(dir.path(), "lab", &names(&["left"])).unwrap();
    let bundle = bundle_path(dir.path(), "left");
    for file in ["ca.pem", "node.pem", "node.key", "quic.key", "cluster.id"] {
        let good = std::fs::read(bundle.join(file)).unwrap();
        for cut in [0, 10, good.len() / 2] {
            std::fs::write(bundle.join(file), &good[..cut]).unwrap();
            let error = NodeIdentity::load(dir.path(), "left").unwrap_err().to_string();
            assert!(error.contains(file), "{file} cut to {cut}: {error}");
        }
        std::fs::write(bundle.join(file), good).unwrap();
    }
    let key = bundle.join("node.key");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    let error = NodeIdentity::load(dir.path(), "left").unwrap_err();
    assert!(matches!(error, CertError::Exposed { mode: 0o644, .. }), "{error}");
}

#[test]
fn a_damaged_bundle_is_mended_where_the_authority_is() {
    let dir = tempfile::tempdir().unwrap();
    ensure(dir.path(), "lab", &names(&["left"])).unwrap();
    let reset_key = NodeIdentity::load(dir.path(), "left").unwrap().reset_key;
    std::fs::write(bundle_path(dir.path(), "left").join("node.pem"), "half").unwrap();
    assert_eq!(ensure(dir.path(), "lab", &names(&["left"])).unwrap().renewed, ["left"]);
    assert_eq!(NodeIdentity::load(dir.path(), "left").unwrap().reset_key, reset_key);
}

#[test]
fn certificates_expire() {
    let dir = tempfile::tempdir().unwrap();
    ensure(dir.path(), "lab", &names(&["left"])).unwrap();
    let bundle = bundle_path(dir.path(), "left");
    let identity = read_bundle(&bundle, "left").unwrap();
    let in_days = |days: u64| {
        let now = UnixTime::now().as_secs();
        UnixTime::since_unix_epoch(Duration::from_secs(now + days * 86_400))
    };
    identity.verify(&bundle, in_days(729)).unwrap();
    let error = identity.verify(&bundle, in_days(731)).unwrap_err();
    assert!(matches!(error, CertError::Expired { .. }), "{error}");
    assert!(!identity.valid_in(&bundle, Duration::from_secs(731 * 86_400)));
}

#[test]
fn many_processes_may_ensure_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                ensure(path, "lab", &names(&["a", "b"])).unwrap();
                NodeIdentity::load(path, "a").unwrap();
            });
        }
    });
}

#[test]
fn incarnations_rise_whatever_the_clock_does() {
    let dir = tempfile::tempdir().unwrap();
    ensure(dir.path(), "lab", &names(&["left"])).unwrap();
    let next = |now| incarnation::next_at(dir.path(), "left", now).unwrap();
    assert_eq!(
        [next(1000), next(1000), next(500), next(2000), next(0)],
        [1000, 1001, 1002, 2000, 2001]
    );
    assert!(next_incarnation(dir.path(), "left").unwrap() > 1_700_000_000);
    let file = bundle_path(dir.path(), "left").join("incarnation");
    std::fs::write(&file, "x").unwrap();
    let error = next_incarnation(dir.path(), "left").unwrap_err().to_string();
    assert!(error.contains("incarnation: it does not hold a number"), "{error}");
    assert!(matches!(next_incarnation(dir.path(), "no"), Err(CertError::NoBundle { .. })));
}
