import { readFileSync } from 'node:fs';
import { join } from 'node:path';

const root = join(__dirname, '..', '..', '..');
export const readPage = (path: string): string => readFileSync(join(root, path), 'utf8');

/** Without the common indentation, imports and `export`, for a region may stand inside a test. */
const plain = (code: string): string => {
  const lines = code
    .split('\n')
    .filter((line) => !line.startsWith('import '))
    .map((line) => line.replace(/^(\s*)export /, '$1'));
  const text = lines.filter((line) => line.trim() !== '');
  const indent = Math.min(...text.map((line) => line.search(/\S/)));
  return lines
    .map((line) => line.slice(indent).trimEnd())
    .join('\n')
    .trim();
};

/** Names as `name module`, of every import of one line or of many. */
const imports = (code: string): string[] =>
  [...code.matchAll(/^import (?:type )?\{([^}]*)\} from '([^']+)';$/gm)].flatMap(([, names = '', module]) =>
    names
      .split(',')
      .map((name) => name.trim().replace(/^type /, ''))
      .filter((name) => name !== '')
      .map((name) => `${name} ${module}`),
  );

/**
 * The TypeScript of a page must be code that compiles and runs: what stands in this spec between `#region` and `#endregion`. Throws with the first
 * block that is not there.
 */
export function expectPageShowsSpec(page: string, spec: string): void {
  const source = readPage(spec);
  const regions = [...source.matchAll(/^ *\/\/ #region.*\n([\s\S]*?)^ *\/\/ #endregion$/gm)].map(([, code = '']) =>
    plain(code),
  );
  const blocks = [...readPage(page).matchAll(/^```ts\n([\s\S]*?)^```$/gm)].map(([, code = '']) => code);
  expect(blocks.length).toBeGreaterThan(0);
  for (const block of blocks) {
    expect(regions).toContain(plain(block));
    expect(imports(source)).toEqual(expect.arrayContaining(imports(block)));
  }
}
