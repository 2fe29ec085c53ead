// Jest runs what tsc has compiled: the same files that ship, with no transform between a test and its subject.
const { spawnSync } = require('node:child_process');
const { existsSync, readdirSync, rmSync } = require('node:fs');
const { join } = require('node:path');

const libs = readdirSync(join(__dirname, 'libs'));
// Each folder of compiled specs, and where their sources are.
const compiled = [
  ['dist/test', 'test'],
  ['dist/apps', 'apps'],
  ...libs.map((name) => [`libs/${name}/dist`, `libs/${name}/src`]),
];

// The environment tells the workers, and a config that is loaded twice, that it is done.
if (!process.env.LEASE_TESTS_BUILT) {
  build();
  removeOrphans();
  process.env.LEASE_TESTS_BUILT = '1';
}

function build() {
  const tsc = require.resolve('typescript/bin/tsc');
  const { status, stdout } = spawnSync(process.execPath, [tsc, '-b', '--pretty', 'false'], {
    cwd: __dirname,
    encoding: 'utf8',
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  if (status === 0) return;
  process.stderr.write(`${stdout}\ntsc -b failed: no test was run\n`);
  if (process.env.LEASE_CI_SUMMARY === '1') process.stdout.write('0 passed, 1 failed\n');
  process.exit(1);
}

// tsc never removes the output of a deleted or renamed spec, which would go on being run.
function removeOrphans() {
  for (const [output, source] of compiled) {
    if (!existsSync(join(__dirname, output))) continue;
    for (const file of readdirSync(join(__dirname, output), { recursive: true })) {
      const name = String(file);
      if (!name.endsWith('.spec.js')) continue;
      if (!existsSync(join(__dirname, source, name.replace(/\.js$/, '.ts')))) rmSync(join(__dirname, output, name));
    }
  }
}

/** @type {import('jest').Config} */
module.exports = {
  rootDir: __dirname,
  roots: compiled.map(([output]) => join(__dirname, output)).filter((path) => existsSync(path)),
  testEnvironment: 'node',
  testRegex: '\\.spec\\.js$',
  transform: {},
  globalSetup: join(__dirname, 'dist/test/support/global-setup.js'),
  globalTeardown: join(__dirname, 'dist/test/support/global-teardown.js'),
  reporters: ['default', join(__dirname, 'dist/test/support/ci-reporter.js')],
  maxWorkers: 2,
  testTimeout: 60_000,
};
