//! TLS 1.3 both ways under the cluster's own authority, and nothing else.

use super::QuicOptions;
use crate::certs::NodeIdentity;
use quinn::TransportConfig;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::time_provider::TimeProvider;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

const ALPN: &[u8] = b"dunlin/1";

pub(super) fn server(
    identity: &NodeIdentity,
    transport: Arc<TransportConfig>,
    options: &QuicOptions,
) -> Result<quinn::ServerConfig, String> {
    let provider = provider();
    let verifier = WebPkiClientVerifier::builder_with_provider(roots(identity)?, provider.clone())
        .build()
        .map_err(|e| e.to_string())?;
    let mut tls = rustls::ServerConfig::builder_with_details(provider, SteadyTime::new())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| e.to_string())?
        .with_client_cert_verifier(verifier)
        .with_single_cert(identity.chain.clone(), identity.key.clone_key())
        .map_err(|e| e.to_string())?;
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let tls = QuicServerConfig::try_from(tls).map_err(|e| e.to_string())?;
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(tls));
    config
        .transport_config(transport)
        .max_incoming(options.half_open.max(1))
        .incoming_buffer_size(64 << 10)
        .incoming_buffer_size_total(1 << 20);
    Ok(config)
}

pub(super) fn client(
    identity: &NodeIdentity,
    transport: Arc<TransportConfig>,
) -> Result<quinn::ClientConfig, String> {
    let mut tls = rustls::ClientConfig::builder_with_details(provider(), SteadyTime::new())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| e.to_string())?
        .with_root_certificates(roots(identity)?)
        .with_client_auth_cert(identity.chain.clone(), identity.key.clone_key())
        .map_err(|e| e.to_string())?;
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let tls = QuicClientConfig::try_from(tls).map_err(|e| e.to_string())?;
    let mut config = quinn::ClientConfig::new(Arc::new(tls));
    config.transport_config(transport);
    Ok(config)
}

/// What certificates are held against: the wall clock as it stood when the endpoint was made, and
/// the time that has passed since. A wall clock that jumps cuts no running node off.
#[derive(Debug)]
struct SteadyTime {
    wall: Duration,
    began: Instant,
}

impl SteadyTime {
    fn new() -> Arc<Self> {
        let wall = crate::wall::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Arc::new(Self { wall, began: Instant::now() })
    }
}

impl TimeProvider for SteadyTime {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(self.wall + self.began.elapsed()))
    }
}

/// Node names in the peer's certificate, which the handshake has verified.
pub(super) fn proven_names(connection: &quinn::Connection, cluster_id: &[u8; 16]) -> Vec<String> {
    let suffix = NodeIdentity::dns_name("", cluster_id);
    let identity = connection.peer_identity();
    let chain = identity.and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
    let Some(leaf) = chain.as_ref().and_then(|chain| chain.first()) else { return Vec::new() };
    let Ok(certificate) = webpki::EndEntityCert::try_from(leaf) else { return Vec::new() };
    certificate
        .valid_dns_names()
        .filter_map(|name| name.strip_suffix(&suffix))
        .map(str::to_owned)
        .collect()
}

fn roots(identity: &NodeIdentity) -> Result<Arc<RootCertStore>, String> {
    let mut roots = RootCertStore::empty();
    roots.add(identity.ca.clone()).map_err(|e| e.to_string())?;
    Ok(Arc::new(roots))
}

/// AES-128-GCM first: the fastest with AES instructions, by a factor of two over ChaCha20.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    let aes128 = rustls::CipherSuite::TLS13_AES_128_GCM_SHA256;
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != aes128);
    Arc::new(provider)
}
