import { spawn } from 'node:child_process';
import { EmbeddedPostgresError } from './errors';
import type { Guard } from './guard';
import { serverEnvironment, type RunContext } from './run';

/** Fills an empty folder with a new cluster whose one role is `postgres`. */
export async function initdb(program: string, dataDir: string, durable: boolean, context: RunContext, guard: Guard) {
  const args = ['-D', dataDir, '-U', 'postgres', '-A', 'trust', '-E', 'UTF8', '--locale=C'];
  if (!durable) args.push('--no-sync');
  // In a group of its own: a Ctrl-C is ours to handle, and the guard can kill it with its children.
  const child = spawn(program, args, {
    ...context.account,
    cwd: context.cwd,
    env: serverEnvironment(),
    detached: true,
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  if (child.pid !== undefined) guard.watch('initdb', child.pid);
  let output = '';
  const collect = (chunk: Buffer): void => void (output += chunk.toString());
  child.stdout.on('data', collect);
  child.stderr.on('data', collect);
  const end = await new Promise<string>((resolve) => {
    child.once('error', (error) => resolve(error.message));
    child.once('close', (code, signal) => resolve(code === 0 ? '' : `exit ${code ?? signal}`));
  });
  guard.watchNothing();
  if (end === '') return;
  // A container that runs under a number without a name.
  const nameless = output.includes('could not look up effective user ID');
  throw new EmbeddedPostgresError(
    nameless ? 'ACCOUNT_UNKNOWN' : 'INITDB_FAILED',
    nameless
      ? 'initdb needs an account with a name, and the one that runs this has none: ' +
          'give it a line in /etc/passwd, start as another account, or set DATABASE_URL to a PostgreSQL 14 or later.'
      : `initdb could not fill ${dataDir} (${end}); its output tells why, a full disk for instance:\n${output.trim()}`,
  );
}
