//! Makes the authority and the nodes' bundles where they are missing.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use super::{CertError, NodeIdentity, bundle_path, files, hex, read_bundle, read_cluster_id};

const DAY: Duration = Duration::from_secs(86_400);
const CA_DAYS: u64 = 3650;
const NODE_DAYS: u64 = 730;
/// A certificate with less than this left is made anew.
const RENEW_DAYS: u32 = 30;

/// What [`ensure`] found and did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ensured {
    pub dir: PathBuf,
    pub made_authority: bool,
    /// Nodes whose bundle is new.
    pub made: Vec<String>,
    /// Nodes whose certificate was damaged or about to expire and is new; their other keys stay.
    pub renewed: Vec<String>,
    /// Nodes whose bundle was good.
    pub present: Vec<String>,
}

/// Sees to it that every one of `nodes` has a good bundle in `dir`, making the authority first if the
/// folder is new. Safe to call from several processes at once.
///
/// On a machine that holds bundles only (no `ca.key`), it checks that they are there.
pub fn ensure(dir: &Path, cluster: &str, nodes: &[String]) -> Result<Ensured, CertError> {
    files::make_dir(dir)?;
    let _lock = files::lock(&dir.join("lock"))?;
    let mut ensured = Ensured { dir: dir.to_path_buf(), ..Ensured::default() };
    let ca_key = dir.join("ca.key");
    if !ca_key.exists() && !has_bundles(dir) {
        make_authority(dir, cluster)?;
        ensured.made_authority = true;
    }
    for node in nodes {
        let bundle = bundle_path(dir, node);
        let good = bundle.join("node.pem").exists()
            && read_bundle(&bundle, node).is_ok_and(|id| id.valid_in(&bundle, DAY * RENEW_DAYS));
        if good {
            ensured.present.push(node.clone());
        } else if ca_key.exists() {
            let is_new = !bundle.exists();
            make_bundle(dir, node)?;
            if is_new { &mut ensured.made } else { &mut ensured.renewed }.push(node.clone());
        } else if bundle.exists() {
            // Not renewable here: usable as long as it is valid.
            NodeIdentity::load(dir, node)?;
            ensured.present.push(node.clone());
        } else {
            let dir = dir.to_path_buf();
            return Err(CertError::NoAuthority { node: node.clone(), dir });
        }
    }
    Ok(ensured)
}

fn has_bundles(dir: &Path) -> bool {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with("bundle-"))
}

fn make_authority(dir: &Path, cluster: &str) -> Result<(), CertError> {
    let failed = |e: rcgen::Error| CertError::Crypto {
        what: "the cluster's authority",
        reason: e.to_string(),
    };
    let id: [u8; 16] = random()?;
    let key = KeyPair::generate().map_err(failed)?;
    let ca = ca_params(cluster, &id).self_signed(&key).map_err(failed)?;
    files::write(&dir.join("cluster.id"), format!("{}\n", hex(&id)).as_bytes(), false)?;
    files::write(&dir.join("ca.pem"), ca.pem().as_bytes(), false)?;
    // Last: its presence says that the authority is whole.
    files::write(&dir.join("ca.key"), key.serialize_pem().as_bytes(), true)
}

fn ca_params(cluster: &str, id: &[u8; 16]) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let short = &hex(id)[..8];
    params.distinguished_name.push(DnType::CommonName, format!("{cluster} ({short}) dunlin CA"));
    set_validity(&mut params, CA_DAYS);
    params
}

fn make_bundle(dir: &Path, node: &str) -> Result<(), CertError> {
    let failed =
        |e: rcgen::Error| CertError::Crypto { what: "a node's certificate", reason: e.to_string() };
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let ca_pem = text(files::read(&dir.join("ca.pem"))?);
    let ca_key = text(files::read_secret(&dir.join("ca.key"))?);
    let ca_key = KeyPair::from_pem(&ca_key).map_err(|_| CertError::File {
        path: dir.join("ca.key"),
        reason: "it holds no private key".to_string(),
        mend: "restore it from a backup, or remove the folder and distribute new bundles".into(),
    })?;
    let issuer = Issuer::from_ca_cert_pem(&ca_pem, ca_key).map_err(failed)?;
    let id = read_cluster_id(dir)?;
    let key = KeyPair::generate().map_err(failed)?;
    let mut params =
        CertificateParams::new(vec![NodeIdentity::dns_name(node, &id)]).map_err(failed)?;
    params.distinguished_name.push(DnType::CommonName, node);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    set_validity(&mut params, NODE_DAYS);
    let certificate = params.signed_by(&key, &issuer).map_err(failed)?;

    let bundle = bundle_path(dir, node);
    files::make_dir(&bundle)?;
    files::write(&bundle.join("cluster.id"), format!("{}\n", hex(&id)).as_bytes(), false)?;
    files::write(&bundle.join("ca.pem"), ca_pem.as_bytes(), false)?;
    let quic = bundle.join("quic.key");
    if files::read_secret(&quic).map_or(0, |bytes| bytes.len()) != 72 {
        files::write(&quic, &random::<72>()?, true)?;
    }
    files::write(&bundle.join("node.key"), key.serialize_pem().as_bytes(), true)?;
    files::write(&bundle.join("node.pem"), certificate.pem().as_bytes(), false)
}

/// From yesterday, for clocks that differ, for as many days.
fn set_validity(params: &mut CertificateParams, days: u64) {
    let today = crate::wall::unix_seconds() / 86_400;
    let date = |day: u64| {
        let (year, month, day) = civil(day);
        rcgen::date_time_ymd(year, month, day)
    };
    params.not_before = date(today.saturating_sub(1));
    params.not_after = date(today + days);
}

/// Days since 1970-01-01 to a date of the Gregorian calendar (Hinnant, "chrono-compatible low-level
/// date algorithms").
fn civil(days: u64) -> (i32, u8, u8) {
    let z = days + 719_468;
    let era = z / 146_097;
    let day_of_era = z % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (
        i32::try_from(year).unwrap_or(i32::MAX),
        u8::try_from(month).unwrap_or(12),
        u8::try_from(day).unwrap_or(28),
    )
}

fn random<const N: usize>() -> Result<[u8; N], CertError> {
    let mut bytes = [0; N];
    let filled = rustls::crypto::ring::default_provider().secure_random.fill(&mut bytes);
    match filled {
        Ok(()) => Ok(bytes),
        Err(_) => Err(CertError::Crypto {
            what: "a key",
            reason: "the system gives no random bytes".to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::civil;

    #[test]
    fn dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(20_786), (2026, 11, 29));
        assert_eq!(civil(47_541), (2100, 3, 1));
    }
}
