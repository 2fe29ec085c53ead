/** Settings of the server, weakest first: those every server needs, the speed of throwaway data, the caller's. */
export function serverSettings(durable: boolean, own: Record<string, string> = {}): Record<string, string> {
  return {
    listen_addresses: '127.0.0.1',
    // Sockets live in folders that other accounts may not enter, under paths with a limit of 107 bytes.
    unix_socket_directories: '',
    max_connections: '200',
    wal_level: 'replica',
    ...(durable ? {} : { fsync: 'off', full_page_writes: 'off' }),
    ...own,
  };
}
