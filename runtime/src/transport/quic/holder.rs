//! Who holds a UDP port: for the message that it is in use. Linux only, best effort.

/// `name (pid N)` of the process that has a socket on the port, if this user may see it.
pub(super) fn of_udp_port(port: u16) -> Option<String> {
    let inodes: Vec<String> = ["/proc/net/udp", "/proc/net/udp6"]
        .iter()
        .filter_map(|table| std::fs::read_to_string(table).ok())
        .flat_map(|table| inodes_of(&table, port))
        .collect();
    let processes = std::fs::read_dir("/proc").ok()?;
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(files) = std::fs::read_dir(process.path().join("fd")) else { continue };
        let holds = files.flatten().any(|file| {
            let target = std::fs::read_link(file.path()).unwrap_or_default();
            inodes.iter().any(|inode| target.as_os_str() == format!("socket:[{inode}]").as_str())
        });
        if holds {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some(format!("{} (pid {pid})", name.trim()));
        }
    }
    None
}

/// Column 1 is `ADDRESS:PORT` in hex, column 9 the inode.
fn inodes_of(table: &str, port: u16) -> Vec<String> {
    let suffix = format!(":{port:04X}");
    let lines = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines
        .filter(|fields| fields.get(1).is_some_and(|local| local.ends_with(&suffix)))
        .filter_map(|fields| fields.get(9).map(|inode| inode.to_string()))
        .collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_inode_is_found_by_port() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n\
                     1: 0100007F:1CE8 00000000:0000 07 00000000:00000000 00:00000000 00000000  1000        0 4711 2 0 0\n\
                     2: 0100007F:1CE9 00000000:0000 07 00000000:00000000 00:00000000 00000000  1000        0 4712 2 0 0\n\
                     garbage\n";
        assert_eq!(super::inodes_of(table, 7400), vec!["4711"]);
        assert!(super::inodes_of(table, 80).is_empty());
    }
}
