import { spawn } from 'node:child_process';
import { rmSync } from 'node:fs';

/**
 * Runs Redis, and ends it when whoever started this process is gone, however it went. Arguments: port, data folder (removed at the end).
 */
const [, , port = '', folder = ''] = process.argv;

const server = spawn(
  'redis-server',
  ['--port', port, '--bind', '127.0.0.1', '--dir', folder, '--appendonly', 'no', '--save', '', '--daemonize', 'no'],
  // In a group of its own, so that Ctrl-C does not end it before the benchmark has closed what uses it.
  { stdio: 'ignore', detached: true },
);
server.once('error', (error) => {
  console.error(error.message);
  process.exit(1);
});
server.once('exit', () => {
  rmSync(folder, { recursive: true, force: true });
  process.exit(0);
});
process.on('SIGINT', () => undefined);
process.on('SIGHUP', () => undefined);
process.on('SIGTERM', () => server.kill('SIGKILL'));
process.on('disconnect', () => server.kill('SIGKILL'));
process.send?.({ pid: server.pid });
