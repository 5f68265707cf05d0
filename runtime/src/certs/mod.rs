//! The cluster's own certificate authority, node certificates, and what else makes a node itself.
//!
//! In the certificates' folder (`STATE_DIR/certs`):
//!
//! ```text
//! ca.pem ca.key cluster.id     the authority; ca.key stays on the machine that made it
//! bundle-NAME/                 all that node NAME needs, to be copied to its machine
//!     ca.pem node.pem node.key quic.key cluster.id
//!     incarnation              how often the node has been started; written by it
//! ```
//!
//! Invariants: files are written whole or not at all; keys have mode 0600 from the start and are
//! refused if others can read them; no key is ever printed.

mod authority;
mod files;
mod incarnation;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, RootCertStore};

pub use self::authority::{Ensured, ensure};
pub use self::incarnation::next_incarnation;

/// Who a node is towards its peers: what the QUIC endpoint needs, and nothing that may be printed.
///
/// The certificate's one subject alternative name is [`NodeIdentity::dns_name`] of this node.
pub struct NodeIdentity {
    pub node: String,
    pub cluster_id: [u8; 16],
    pub ca: CertificateDer<'static>,
    /// Leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
    /// Key of stateless reset tokens; the same over restarts, so that peers notice one.
    pub reset_key: [u8; 64],
    /// Key of hashed connection ids; the same over restarts (without it, no reset is recognised).
    pub cid_key: u64,
}

impl fmt::Debug for NodeIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeIdentity({})", Self::dns_name(&self.node, &self.cluster_id))
    }
}

/// Why certificates cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum CertError {
    #[error("{path}: {reason}\n  = help: {mend}")]
    File { path: PathBuf, reason: String, mend: String },
    #[error(
        "node {node} has no certificate in {dir}\n  = help: run `dunlin certs` on the machine that \
         holds the cluster's ca.key, then copy its folder bundle-{node} into {dir} here"
    )]
    NoBundle { node: String, dir: PathBuf },
    #[error(
        "{dir} has bundles but no ca.key, so a certificate for node {node} cannot be made here\n  \
         = help: run `dunlin certs` on the machine that holds ca.key, then copy bundle-{node} here"
    )]
    NoAuthority { node: String, dir: PathBuf },
    #[error("{path} can be read by other users (mode {mode:o})\n  = help: chmod 600 {path}")]
    Exposed { path: PathBuf, mode: u32 },
    #[error(
        "the certificate of node {node} has expired ({path})\n  = help: run `dunlin certs` on the \
         machine that holds ca.key and copy bundle-{node} anew; check this machine's clock too"
    )]
    Expired { node: String, path: PathBuf },
    #[error(
        "{path} is not a certificate of node {node} in this cluster: {reason}\n  \
         = help: copy the folder bundle-{node} anew from the machine that holds ca.key"
    )]
    Wrong { node: String, path: PathBuf, reason: String },
    #[error("cannot make {what}: {reason}")]
    Crypto { what: &'static str, reason: String },
}

impl NodeIdentity {
    /// The DNS name that a node's certificate carries and its peers ask for.
    pub fn dns_name(node: &str, cluster_id: &[u8; 16]) -> String {
        format!("{node}.{}.dunlin", hex(cluster_id))
    }

    /// Reads and verifies the bundle of a node: chain, name, expiry, and that the key fits.
    pub fn load(dir: &Path, node: &str) -> Result<NodeIdentity, CertError> {
        let bundle = bundle_path(dir, node);
        if !bundle.is_dir() {
            return Err(CertError::NoBundle { node: node.to_string(), dir: dir.to_path_buf() });
        }
        let identity = read_bundle(&bundle, node)?;
        identity.verify(&bundle, UnixTime::now())?;
        Ok(identity)
    }

    fn verify(&self, bundle: &Path, at: UnixTime) -> Result<(), CertError> {
        let path = bundle.join("node.pem");
        let wrong = |reason: String| CertError::Wrong {
            node: self.node.clone(),
            path: path.clone(),
            reason,
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(self.ca.clone()).map_err(|e| wrong(e.to_string()))?;
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
                .build()
                .map_err(|e| wrong(e.to_string()))?;
        let name = ServerName::try_from(Self::dns_name(&self.node, &self.cluster_id))
            .map_err(|e| wrong(e.to_string()))?;
        let leaf = self.chain.first().ok_or_else(|| wrong("it is empty".to_string()))?;
        match verifier.verify_server_cert(leaf, &[], &name, &[], at) {
            Ok(_) => {}
            Err(rustls::Error::InvalidCertificate(
                CertificateError::Expired | CertificateError::ExpiredContext { .. },
            )) => return Err(CertError::Expired { node: self.node.clone(), path }),
            Err(e) => return Err(wrong(e.to_string())),
        }
        let keys = rustls::sign::CertifiedKey::from_der(
            self.chain.clone(),
            self.key.clone_key(),
            &provider,
        );
        keys.map(drop).map_err(|e| wrong(format!("node.key does not fit it: {e}")))
    }

    /// Is it valid at that time from now on?
    fn valid_in(&self, bundle: &Path, ahead: Duration) -> bool {
        let at = UnixTime::since_unix_epoch(Duration::from_secs(UnixTime::now().as_secs()) + ahead);
        self.verify(bundle, at).is_ok()
    }
}

/// Where a node's bundle is.
pub fn bundle_path(dir: &Path, node: &str) -> PathBuf {
    dir.join(format!("bundle-{node}"))
}

/// Reads a bundle without judging its certificates.
fn read_bundle(bundle: &Path, node: &str) -> Result<NodeIdentity, CertError> {
    let damaged = |name: &str, reason: &str| CertError::File {
        path: bundle.join(name),
        reason: reason.to_string(),
        mend: format!("copy the folder bundle-{node} anew from the machine that holds ca.key"),
    };
    let ca = CertificateDer::from_pem_slice(&files::read(&bundle.join("ca.pem"))?)
        .map_err(|e| damaged("ca.pem", &e.to_string()))?;
    let leaf = CertificateDer::from_pem_slice(&files::read(&bundle.join("node.pem"))?)
        .map_err(|e| damaged("node.pem", &e.to_string()))?;
    let key = PrivateKeyDer::from_pem_slice(&files::read_secret(&bundle.join("node.key"))?)
        .map_err(|_| damaged("node.key", "it holds no private key"))?;
    let quic = files::read_secret(&bundle.join("quic.key"))?;
    let (reset_key, cid_key) = match (quic.first_chunk::<64>(), quic.last_chunk::<8>()) {
        (Some(reset), Some(cid)) if quic.len() == 72 => (*reset, u64::from_le_bytes(*cid)),
        _ => return Err(damaged("quic.key", "it does not have 72 bytes")),
    };
    let cluster_id = read_cluster_id(bundle)?;
    let node = node.to_string();
    Ok(NodeIdentity { node, cluster_id, ca, chain: vec![leaf], key, reset_key, cid_key })
}

fn read_cluster_id(dir: &Path) -> Result<[u8; 16], CertError> {
    let path = dir.join("cluster.id");
    let bytes = files::read(&path)?;
    let text = std::str::from_utf8(&bytes).unwrap_or_default().trim();
    unhex(text).ok_or_else(|| CertError::File {
        path,
        reason: "it does not hold 32 hex digits".to_string(),
        mend: "copy it anew from the machine that holds ca.key".to_string(),
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<[u8; 16]> {
    if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    Some(u128::from_str_radix(text, 16).ok()?.to_be_bytes())
}
