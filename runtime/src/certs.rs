//! The cluster's own certificate authority, node certificates, and what else makes a node itself.

use rustls::pki_types::{CertificateDer, PrivateKeyDer};

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

impl NodeIdentity {
    /// The DNS name that a node's certificate carries and its peers ask for.
    pub fn dns_name(node: &str, cluster_id: &[u8; 16]) -> String {
        let hex: String = cluster_id.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{node}.{hex}.dunlin")
    }
}
